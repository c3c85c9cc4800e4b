"""Expert replicas: hot experts on other ranks, planned ahead (Pro-Prophet). No torch."""
