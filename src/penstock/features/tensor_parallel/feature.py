"""Tensor parallelism: ranks that share attention, dense parts, embedding and head."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.features.feature import Feature
from penstock.features.tensor_parallel.ops import OPS, ROUTED
from penstock.features.tensor_parallel.passes import TensorParallel
from penstock.step.shape import FORM_TOKENS, StepShape
from penstock.step.stages import Pass


def _passes(shape: StepShape) -> Sequence[Pass]:
    sharing = shape.sharing
    if sharing.tp_size == 1:
        return ()
    split, moe_split = sharing.tokens == "split", FORM_TOKENS[shape.expert_form] == "split"
    by_sample, differ = sharing.judges_samples, shape.copies_differ
    return (TensorParallel(sharing.tp_size, split, moe_split, by_sample, differ),)


FEATURE = Feature(
    name="tensor_parallel",
    title="cuts attention, dense parts and the vocabulary over the ranks of a group",
    source="Megatron-LM; Parm, section 3",
    ops=OPS,
    passes=_passes,
    routed=ROUTED,
)
