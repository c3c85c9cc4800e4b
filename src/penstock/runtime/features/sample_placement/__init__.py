"""Sample placement on ranks: see `penstock.features.sample_placement`."""
