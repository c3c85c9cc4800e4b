"""Models of transformers: cut into tasks, trained by a schedule, saved as they were."""

from penstock.adapt.build import parallelize
from penstock.adapt.families import FAMILIES
from penstock.adapt.family import Family

__all__ = ["FAMILIES", "Family", "parallelize"]
