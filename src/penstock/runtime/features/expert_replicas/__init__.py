"""Expert replicas on ranks: see `penstock.features.expert_replicas`."""
