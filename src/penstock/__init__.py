"""Penstock trains mixture-of-experts transformers and hides the network behind computation."""

__version__ = "0.1.0"
