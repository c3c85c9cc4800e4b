"""Expert sharding on ranks: see `penstock.features.expert_sharding`."""
