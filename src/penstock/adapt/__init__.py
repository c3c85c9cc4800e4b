"""Models of transformers: cut into tasks, trained by a schedule, saved as they were."""

from penstock.adapt.build import load_pretrained, parallelize
from penstock.adapt.checkpoint import load_optimizer, save_checkpoint
from penstock.adapt.lightning_loop import follow_lightning
from penstock.adapt.scheduled import LIBRARIES, stack_of
from penstock.adapt.upstream import follow_libraries
from penstock.families.known import FAMILIES, AttentionCut, Family

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
