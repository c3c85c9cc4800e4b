"""How many rows go where: from rank to rank, by leg, chunk and expert. The one place that works it out.

Transports, the cost model and virtual ranks read it. Numpy only: no torch.
"""
