"""Expert parallelism for layers that run by themselves, and marks that say which ranks hold an expert."""
