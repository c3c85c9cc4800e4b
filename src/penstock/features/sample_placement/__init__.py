"""Sample placement: samples move so that fewer rows cross nodes (NetMoE). No torch."""
