"""Observes what gates choose, sample by sample, in a few steps of training: the evidence for moving.

Shapes: D groups of ranks with the same samples, B samples of such a group, Y MoE layers, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from penstock.apportion import Counts
from penstock.cost.placed import Evidence
from penstock.mesh import Group
from penstock.moe.choices import GateSums
from penstock.moe.tokens import Tokens
from penstock.runtime import PipelinedStack

OBSERVED_STEPS = 2
"""One step from which guests would be planned, and the next one, in which they would be used."""

LayerCounts = Mapping[int, Counts]
"""How often each expert was chosen, [E], by sample id."""


class Observer:
    """Counts the choices of every sample while it is open. All ranks open, query and close it together."""

    def __init__(self, stack: PipelinedStack) -> None:
        self._stack = stack
        self._layers = [part.moe for part in stack.parts.parts if part.moe is not None]
        self._chosen: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self._layers]
        self._steps: list[list[LayerCounts]] = []
        self._hooks: list[RemovableHandle] = [
            layer.gate.register_forward_hook(partial(self._note, place))
            for place, layer in enumerate(self._layers)
        ]

    def end_step(self) -> bool:
        """Record a finished step; return whether enough steps have been observed."""
        self._steps.append([_by_sample(each) for each in self._chosen])
        for chosen in self._chosen:
            chosen.clear()
        return len(self._steps) == OBSERVED_STEPS

    def close(self) -> Evidence | None:
        """Return what all ranks have observed; None where some group had no samples."""
        for hook in self._hooks:
            hook.remove()
        everyone = self._stack.machinery.control.gather(self._steps, "gathering what samples chose")
        before, now = ([steps[number] for steps in everyone] for number in range(OBSERVED_STEPS))
        found = [self._assembled(each) for each in (before, now)]
        return None if found[0] is None or found[1] is None else Evidence(found[0], found[1])

    def _note(self, place: int, gate: nn.Module, given: tuple[Any, ...], choice: Any) -> None:
        """Record a gate's choices in a training pass; evaluations, and gates asked ahead, do not count."""
        tokens: Tokens = given[1]
        if not gate.training or tokens.keys is None or tokens.clean:
            return
        sums: GateSums = choice.sums
        self._chosen[place].append((tokens.keys.sample_ids_B, sums.chosen_BE))

    def _assembled(self, everyone: Sequence[Sequence[LayerCounts]]) -> Counts | None:
        """Return counts of one step, [D, B, Y, E], samples in the first layer's order, as in every group."""
        mesh = self._stack.machinery.layout.mesh
        groups = mesh.groups(Group.TENSOR)
        total: list[dict[int, Counts]] = [{} for _ in self._layers]
        for place, layer in enumerate(total):
            for ranks in groups:
                for rank in ranks if self._splits_tokens else ranks[:1]:
                    for sample, counts_E in everyone[rank][place].items():
                        layer[sample] = layer.get(sample, 0) + counts_E
        held = [sorted(everyone[ranks[0]][0]) for ranks in groups]
        samples = min(map(len, held))
        if not samples:
            return None
        return np.array([[[layer[s] for layer in total] for s in here[:samples]] for here in held])

    @property
    def _splits_tokens(self) -> bool:
        """Whether ranks that share attention each have a part of every sample's tokens at the gates."""
        shape = self._stack.plan.shape
        return any(shape.tokens_of(n) == "split" for n, is_moe in enumerate(shape.moe_layers) if is_moe)


def _by_sample(chosen: Sequence[tuple[Tensor, Tensor]]) -> LayerCounts:
    return {
        sample: counts_E
        for ids_B, chosen_BE in chosen
        for sample, counts_E in zip(ids_B.tolist(), chosen_BE.cpu().numpy(), strict=True)
    }
