"""Permutations: from a choice to rows in expert order, and back."""
