"""Constants of the clusters that come with Penstock, and how far predictions are from what others measured.

- `tasks`: what papers say that single tasks took, as rows that a cluster file prices.
- `hardware`: the clusters of the papers: devices, links, and what is assumed of their class.
- `fit`: rates and start-ups from both; `python -m benchmarks.calibration --write` writes the files.
- `held_out`: results of the papers to which nothing is fitted.
- `gpu`: steps of open models on GPUs, as their frameworks' users measured them.
"""
