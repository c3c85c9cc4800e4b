"""Expert sharding: ranks that share every expert (Parm, FSMoE). No torch."""
