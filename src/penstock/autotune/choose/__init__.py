"""Chooses: the layout of a run, its first plan, and what moves."""
