"""Measures a cluster, and a model on it."""
