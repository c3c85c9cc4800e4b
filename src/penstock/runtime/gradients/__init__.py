"""Gradients of a model: which reduction each belongs to, the buckets they lie in, and their norm."""
