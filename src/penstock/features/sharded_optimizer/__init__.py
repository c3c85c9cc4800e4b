"""The sharded optimiser: updates as tasks of the step (ZeRO). No torch."""
