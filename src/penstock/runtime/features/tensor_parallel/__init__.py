"""Tensor parallelism on ranks: see `penstock.features.tensor_parallel`."""
