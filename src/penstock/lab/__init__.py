"""The lab: clusters, devices and comparisons to learn from. What trains and plans does without it."""
