"""Graph transformations of the core, one file each; those of features stand in their folders."""
