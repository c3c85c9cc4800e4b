"""An optimiser of which every rank owns a share: what the share is, its tasks, and the optimiser itself."""
