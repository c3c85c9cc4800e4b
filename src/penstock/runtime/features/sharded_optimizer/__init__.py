"""The sharded optimiser on ranks: see `penstock.features.sharded_optimizer`."""
