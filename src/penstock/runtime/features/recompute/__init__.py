"""Recomputation on ranks: see `penstock.features.recompute`."""
