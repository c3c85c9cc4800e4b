"""Experts: networks over rows that are sorted by expert."""
