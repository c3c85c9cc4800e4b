"""Training: data, optimiser, checkpoints, metrics, and the loop that uses them."""
