"""Recomputation: what is computed a second time instead of being kept. No torch."""
