"""Megatron-Core without a GPU: what it asks of CUDA gets answers that do nothing, for as long as it runs.

Megatron-Core calls a few functions of `torch.cuda` without asking whether there is a GPU. They are replaced
only inside `on_cpu`, so that nothing else in this process ever sees the replacements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from benchmarks.peers.scoped import replaced


class NoStream:
    """A CUDA stream on a machine where everything is done when a call returns."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, stream: NoStream) -> None:
        """Nothing to wait for."""

    def record_event(self) -> NoEvent:
        return NoEvent()


class NoEvent:
    """An event that has happened already."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


_ONE_STREAM = NoStream()


@contextmanager
def on_cpu() -> Iterator[None]:
    """Inside, Megatron-Core runs on CPU tensors. What was replaced returns on any exit."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    dispatcher = token_dispatcher.MoEAlltoAllTokenDispatcher
    with ExitStack() as stack:
        for owner, name, stand_in in (
            (torch.cuda, "current_device", lambda: torch.device("cpu")),
            (torch.cuda, "Stream", NoStream),
            (torch.cuda, "current_stream", lambda device=None: _ONE_STREAM),
            (torch.cuda, "stream", _inside),
            (dispatcher, "cuda_dtoh_stream", _ONE_STREAM),
            (moe_utils, "te_general_gemm", None),
            (token_dispatcher, "maybe_move_tensor_to_cpu", _as_list(token_dispatcher)),
        ):
            stack.enter_context(replaced(owner, name, stand_in))
        yield


def _inside(stream: NoStream | None) -> AbstractContextManager[None]:
    """Stand in for `torch.cuda.stream`."""
    del stream
    return nullcontext()


def _as_list(token_dispatcher: Any) -> Callable[..., Any]:
    """Return `maybe_move_tensor_to_cpu` for tensors that are there already: it makes lists for torch.

    Megatron-Core asks for an array where it needs numbers, and makes one only of what comes from a GPU.
    """
    original = token_dispatcher.maybe_move_tensor_to_cpu

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        moved = original(tensor, as_numpy=as_numpy, record_stream=record_stream)
        return moved.tolist() if as_numpy and isinstance(moved, torch.Tensor) else moved

    return move
