"""`generate` of a scheduled model: every rank has prompts, lengths and caches of its own.

Shapes: B samples, L tokens per sample.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from penstock.adapt.passes import Passes


def together_from(plain: Any) -> dict[str, Callable[..., Any]]:
    """Return the functions with which models of the class `plain` generate on several ranks."""
    return {"generate": _generate(plain), "init_continuous_batching": _refuse_threads(plain)}


def _generate(plain: Any) -> Callable[..., Any]:
    """Return `generate` for models of the class `plain`, in which ranks take part until all have finished."""

    @wraps(plain.generate)
    def generate(self: Any, *arguments: Any, **named: Any) -> Any:
        passes = _passes_of(self)
        if not passes.meetings:
            return plain.generate(self, *arguments, **named)
        named["synced_gpus"] = False  # would run every rank as long as the last one, beyond what caches hold

        given = [*arguments[:1], *(named.get(name) for name in ("inputs", "input_ids", "inputs_embeds"))]
        prompts = next((each for each in given if isinstance(each, Tensor)), None)

        def run() -> Any:
            if prompts is not None and not len(prompts):
                return _nothing_new(self, prompts, named)
            assistant = named.get("assistant_model")
            if assistant is not None and "_penstock" in vars(assistant) and _passes_of(assistant).meetings:
                raise ValueError(
                    "assistant_model is spread over ranks, too, and ranks would ask it at different times: "
                    "give an assistant that every rank holds whole"
                )
            return plain.generate(self, *arguments, **named)

        return passes.generate(run)

    return generate


def _refuse_threads(plain: Any) -> Callable[..., Any]:
    """Return the beginning of continuous batching for models of the class `plain`; refused between ranks."""

    @wraps(plain.init_continuous_batching)
    def init_continuous_batching(self: Any, *arguments: Any, **named: Any) -> Any:
        if _passes_of(self).meetings:
            raise ValueError(
                "continuous batching (paged caches, generate_batch) runs forward passes on a thread, for "
                "which other ranks would not wait, and experts are spread over ranks: leave "
                "cache_implementation out, or generate on one process"
            )
        return plain.init_continuous_batching(self, *arguments, **named)

    return init_continuous_batching


def _nothing_new(model: Any, prompts: Tensor, named: dict[str, Any]) -> Any:
    """Return what `generate` makes of no prompts."""
    from transformers.generation.utils import GenerateDecoderOnlyOutput

    tokens_BL = prompts.new_empty(0, 0, dtype=torch.long) if prompts.is_floating_point() else prompts
    config = named.get("generation_config") or model.generation_config
    as_dict = named.get("return_dict_in_generate", config.return_dict_in_generate)
    return GenerateDecoderOnlyOutput(sequences=tokens_BL) if as_dict else tokens_BL


def _passes_of(model: Any) -> Passes:
    passes: Passes = model.__dict__["_penstock"].passes
    return passes
