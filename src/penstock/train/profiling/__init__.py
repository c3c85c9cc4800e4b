"""The parts of `penstock.train.profile`: what is measured, and how long."""
