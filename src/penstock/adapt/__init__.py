"""Models of transformers: cut into tasks, trained by a schedule, saved as they were."""

from penstock.adapt.build import parallelize
from penstock.adapt.checkpoint import load_optimizer, save_checkpoint
from penstock.adapt.lightning_loop import follow_lightning
from penstock.adapt.loading import load_pretrained
from penstock.adapt.scheduled import LIBRARIES, stack_of
from penstock.adapt.upstream import follow_libraries
from penstock.families.family import AttentionCut, Family
from penstock.families.known import FAMILIES

LIBRARIES.extend((follow_libraries, follow_lightning))

__all__ = [
    "FAMILIES",
    "AttentionCut",
    "Family",
    "load_optimizer",
    "load_pretrained",
    "parallelize",
    "save_checkpoint",
    "stack_of",
]
