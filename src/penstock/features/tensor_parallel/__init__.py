"""Tensor parallelism: ranks that share attention, dense parts and the vocabulary. No torch."""
