"""Facts and fingerprints of values by which ranks are compared: what checks and gradients both know."""
