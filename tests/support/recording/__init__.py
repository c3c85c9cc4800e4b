"""A device that records what the code for GPUs asks of it, and what is found in its log."""
