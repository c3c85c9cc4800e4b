"""Measurements and studies that the package does without: run them from this folder's parent.

`python -m benchmarks.suite .` runs all that BENCHMARKS.md shows. Each part is a command of its own:

- `collectives`: the transport alone, how near it comes to the wire.
- `dispatches`: ways to dispatch, flat and hierarchical, small messages and large ones.
- `layer`: the MoE layer in one process, beside other implementations.
- `drift`: training while the network or a rank gets slower.
- `published`: the layers of two studies, by simulation; `published.refit` fits rates to what papers measured.

`peers` holds the other systems that `penstock bench --peers` compares with.
"""
