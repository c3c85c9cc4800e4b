"""Layers of a model of transformers whose attention several ranks share, in the pieces that the engine runs.

A layer's own code runs twice: its attention on the tokens of all ranks, for this rank's heads, and then the
layer on this rank's tokens, with what the ranks' heads have added up to in place of its attention.
Shapes: B samples, L tokens per sample (of all ranks, or this rank's), M hidden size, T = B * L tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from penstock.adapt.cut import Cut
from penstock.adapt.decoder import Calls, CutLayer, WholeLayer, run
from penstock.adapt.tensor import SharedLayer
from penstock.families.family import Family
from penstock.moe import MoELayer, SampleKeys


class _Heads:
    """A layer of which this rank has some heads: their attention, and the layer after attention."""

    layer: Any
    index: int
    _calls: Calls
    _shared: SharedLayer

    def mix(self, h_BLM: Tensor, keys: SampleKeys) -> Tensor:
        """Return what this rank's heads add to the residual stream of all tokens."""
        if not h_BLM.numel():
            return h_BLM
        call, norm = self._calls.of(keys).layers[self.index], self._shared.norm
        assert not call.arguments, "families whose attention is cut name what they give a layer"
        with self._calls.inside.step():
            normed_BLM = h_BLM if norm is None else norm(h_BLM)
            attended: Tensor = self._shared.attention.module(hidden_states=normed_BLM, **call.named)[0]
        return attended

    @contextmanager
    def _attended(self, attended_BLM: Tensor) -> Iterator[None]:
        """Let the layer, inside this context, take this for what its attention returns."""
        self._shared.attention.attended_BLM = attended_BLM
        try:
            yield
        finally:
            self._shared.attention.attended_BLM = None

    def partial_parameters(self) -> list[nn.Parameter]:
        attention, norm = self._shared.attention.module, self._shared.norm
        cut: dict[str, object] = getattr(attention, "shardings", {})
        found = [p for name, p in attention.named_parameters() if name not in cut]
        return found if norm is None else [*found, *norm.parameters()]

    def _others(self, *apart: nn.Module) -> list[nn.Parameter]:
        """Return the layer's parameters outside of attention, the norm before it, and modules `apart`."""
        norm = [] if self._shared.norm is None else [self._shared.norm]
        known = {id(p) for each in (self._shared.attention.module, *norm, *apart) for p in each.parameters()}
        return [p for p in self.layer.parameters() if id(p) not in known]


class SharedCutLayer(_Heads, CutLayer):
    """A layer with experts. Shared experts, router and norms are whole, and work on this rank's tokens."""

    def __init__(
        self,
        layer: Any,
        index: int,
        moe: MoELayer,
        cut: Cut,
        calls: Calls,
        family: Family,
        shared: SharedLayer,
    ) -> None:
        super().__init__(layer, index, moe, cut, calls, family)
        self._shared = shared

    def settle(self, h_BLM: Tensor, attended_BLM: Tensor, keys: SampleKeys) -> tuple[Tensor, Tensor]:
        if not h_BLM.numel():
            return self.nothing(h_BLM + attended_BLM)
        called = self._calls.of(keys)
        attended_T = called.attended_T
        if attended_T is not None:
            here = slice(keys.first_token, keys.first_token + h_BLM.shape[1])
            attended_T = attended_T.view(len(h_BLM), -1)[:, here].flatten()
        with self._attended(attended_BLM):
            return self.until_experts(h_BLM, called, attended_T)

    def token_parameters(self) -> list[nn.Parameter]:
        return self._others(self.cut.experts)


class SharedDenseLayer(_Heads, WholeLayer):
    """A layer without experts, whose feed-forward part is cut by its width."""

    def __init__(self, layer: Any, index: int, calls: Calls, family: Family, shared: SharedLayer) -> None:
        super().__init__(layer, index, calls)
        assert shared.dense is not None, "a layer without experts has a dense part"
        self._shared, self._dense, self._family = shared, shared.dense, family

    def settle(self, h_BLM: Tensor, attended_BLM: Tensor, keys: SampleKeys) -> tuple[Tensor, Tensor]:
        if not h_BLM.numel():
            residual_BLM = h_BLM + attended_BLM
            return residual_BLM, residual_BLM.flatten(0, 1)
        call = self._calls.of(keys).layers[self.index]
        with self._attended(attended_BLM), self._dense.skipping() as entered:
            residual_BLM = run(self.layer, h_BLM, call, self._calls.inside)
        return residual_BLM, entered[0].flatten(0, 1)

    def dense(self, x_TM: Tensor) -> Tensor:
        with self._calls.inside.step():
            out_TM: Tensor = self._dense.plain(x_TM)
        return out_TM

    def add(self, residual_BLM: Tensor, out_TM: Tensor, keys: SampleKeys) -> Tensor:
        del keys
        out_BLM = out_TM.unflatten(0, residual_BLM.shape[:2]).to(residual_BLM.dtype)
        return self._family.finish(self.layer, residual_BLM, out_BLM)

    def token_parameters(self) -> list[nn.Parameter]:
        return self._others(self._dense.module)
