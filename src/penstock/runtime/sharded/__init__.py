"""An optimiser of which every rank owns a share: the share, its tasks, and the optimiser itself."""
