"""Models of known families whose classes run code of the user, or of a tool, in place of transformers'."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MixtralForCausalLM
from transformers.models.mixtral import modeling_mixtral as mixtral

import penstock
from penstock.adapt.build import reload
from tests.support.adapted import Batch, check_grads, small

Change = Callable[[Any], None]


class HalvingBlock(mixtral.MixtralSparseMoeBlock):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * 0.5


class AddingBlock(mixtral.MixtralSparseMoeBlock):
    """Agrees with steps: what it adds does not depend on the experts."""

    def forward(self, x: Tensor) -> Any:
        return 0.1 * x + super().forward(x)


class HalvingExperts(mixtral.MixtralExperts):
    def forward(self, *given: Tensor) -> Any:
        return super().forward(*given) * 0.5


class DetachedExperts(mixtral.MixtralExperts):
    """Computes the same, with other gradients."""

    def forward(self, *given: Tensor) -> Any:
        out = super().forward(*given)
        return out.detach() + 0.5 * (out - out.detach())


class HalvingLayer(mixtral.MixtralDecoderLayer):
    def forward(self, *given: Any, **named: Any) -> Any:
        return super().forward(*given, **named) * 0.5


class DroppingLayer(mixtral.MixtralDecoderLayer):
    """Another one in training alone."""

    def forward(self, *given: Any, **named: Any) -> Any:
        out = super().forward(*given, **named)
        return out * 0.5 if self.training else out


class CallingLayer(mixtral.MixtralDecoderLayer):
    def __call__(self, *given: Any, **named: Any) -> Any:
        return super().__call__(*given, **named) * 0.5


class HalvingDecoder(mixtral.MixtralModel):
    def forward(self, *given: Any, **named: Any) -> Any:
        out = super().forward(*given, **named)
        out.last_hidden_state = out.last_hidden_state * 0.5
        return out


class MoreLoss(MixtralForCausalLM):
    def forward(self, *given: Any, **named: Any) -> Any:
        out = super().forward(*given, **named)
        if out.loss is not None:
            out.loss = out.loss + 0.01 * out.logits.logsumexp(-1).square().mean()
        return out


class ScaledLogits(MixtralForCausalLM):
    """Agrees with steps, which compute the loss of these logits, but leaves out the router loss."""

    def forward(self, *given: Any, labels: Tensor | None = None, **named: Any) -> Any:
        out = super().forward(*given, **named)
        out.logits = out.logits / 2
        if labels is not None:
            out.loss = self.loss_function(out.logits, labels, self.config.vocab_size)
        return out


class HalvingAttention(mixtral.MixtralAttention):
    def forward(self, *given: Any, **named: Any) -> Any:
        out, *others = super().forward(*given, **named)
        return 0.5 * out, *others


class HalvingRouter(mixtral.MixtralTopKRouter):
    def forward(self, x: Tensor) -> Any:
        logits, weights, chosen = super().forward(x)
        return logits, 0.5 * weights, chosen


def change_class(model: Any, kind: type) -> None:
    """Give all modules of its first base class, the model included, this class."""
    for module in list(model.modules()):
        if type(module) is kind.__base__:
            module.__class__ = kind


DIFFERENT = [
    (HalvingBlock, "the output of layer 0"),
    (HalvingExperts, "what HalvingExperts returns"),
    (DetachedExperts, "what DetachedExperts returns, or its gradients"),
    (HalvingLayer, "the output of layer 0"),
    (DroppingLayer, "logits"),
    (CallingLayer, "its decoder changes hidden states"),
    (HalvingDecoder, "its decoder changes hidden states"),
    (MoreLoss, r"the loss \(\d\.\d+ by the model"),
]


@pytest.mark.parametrize(("kind", "what"), DIFFERENT)
def test_a_class_that_steps_would_not_follow_is_refused(kind: type, what: str) -> None:
    model = small("mixtral")
    change_class(model, kind)
    with pytest.raises(ValueError, match=rf"{kind.__name__}\.(forward|__call__) is not .*: ({what})"):
        penstock.parallelize(model)
    assert type(model).__name__ in ("MixtralForCausalLM", "MoreLoss") and model.training


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AddingBlock, ScaledLogits, HalvingAttention, HalvingRouter])
def test_a_class_that_steps_follow_is_taken(tmp_path: Path, kind: type) -> None:
    wanted = small("mixtral")
    change_class(wanted, kind)
    model = penstock.parallelize(copy.deepcopy(wanted), plan="flowmoe")
    given = Batch().inputs()
    for router_loss in (False, kind is not ScaledLogits):
        expected = wanted(**given, output_router_logits=router_loss).loss
        found = model(**given, output_router_logits=router_loss).loss
        assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    if kind is ScaledLogits:
        with pytest.raises(ValueError, match="how ScaledLogits weighs its router loss was not understood"):
            model(**given, output_router_logits=True)
    expected.backward()
    found.backward()
    check_grads(model, wanted, within=1e-4)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    reload(model, tmp_path)
    assert model.lm_head.weight.equal(wanted.lm_head.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen2_moe", "dbrx", "llama4_text", "gpt_oss"])
@pytest.mark.slow
def test_a_family_with_a_harmless_class_agrees_with_itself(family: str, dtype: torch.dtype) -> None:
    model = small(family, dtype=dtype)
    plain = type(model)

    def forward(self: Any, **named: Any) -> Any:
        return plain.forward(self, **named)

    model.__class__ = type("Own", (plain,), {"forward": forward})
    assert penstock.parallelize(model, plan="flowmoe")(**Batch().inputs()).loss.item() > 0


AFTERWARDS = [
    mixtral.MixtralExperts,
    mixtral.MixtralSparseMoeBlock,
    mixtral.MixtralDecoderLayer,
    mixtral.MixtralModel,
    MixtralForCausalLM,
]


def halve(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace `forward` in a class, as tools do."""
    plain = kind.forward

    def forward(self: Any, *given: Any, **named: Any) -> Any:
        out = plain(self, *given, **named)
        if isinstance(out, Tensor):
            return out * 0.5
        out[0] = out[0] * 0.5
        return out

    monkeypatch.setattr(kind, "forward", forward)


@pytest.mark.slow
@pytest.mark.parametrize("kind", AFTERWARDS)
def test_a_class_that_is_patched_afterwards_is_refused(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = penstock.parallelize(small("mixtral"), plan="flowmoe")
    halve(kind, monkeypatch)
    with pytest.raises(ValueError, match=rf"{kind.__name__}\.forward was replaced in its class"):
        model(**Batch().inputs())


def test_another_class_afterwards_is_refused() -> None:
    model = penstock.parallelize(small("mixtral"), plan="flowmoe")
    change_class(model, HalvingBlock)
    with pytest.raises(ValueError, match=r"HalvingBlock\.forward was replaced in its class, or the class"):
        model(**Batch().inputs())


def test_a_class_that_is_patched_before_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small("mixtral")
    model.save_pretrained(tmp_path)
    halve(mixtral.MixtralSparseMoeBlock, monkeypatch)
    with pytest.raises(ValueError, match=r"MixtralSparseMoeBlock\.forward is not the function"):
        penstock.parallelize(model)
    with pytest.raises(ValueError, match=r"MixtralSparseMoeBlock\.forward is .* from_pretrained, and call"):
        penstock.load_pretrained(tmp_path)
