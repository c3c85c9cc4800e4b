"""Checks before a step runs: equal plans, equal parameters, an unchanged model, no misuse."""
