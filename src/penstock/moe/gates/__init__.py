"""Gates: which tokens meet which experts. One file each."""
