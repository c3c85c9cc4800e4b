"""The decoder: its pieces fit together, and its parameters are sorted without gap or overlap."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from penstock.config import ConfigError
from penstock.models import ModelConfig, MoEDecoder
from penstock.models.decoder import Block
from penstock.moe import MoEConfig, SampleKeys
from tests.support.draws import draws

VOCABULARY, LENGTH = 11, 6


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    num_layers = draw(st.integers(1, 4))
    layers = st.sets(st.integers(0, num_layers - 1), min_size=1)
    return ModelConfig(
        num_layers=num_layers,
        hidden_size=8,
        num_heads=2,
        seq_len=LENGTH,
        vocab_size=VOCABULARY,
        moe_layers=draw(st.none() | layers.map(sorted).map(tuple)),
    )


def model(config: ModelConfig, ep_size: int = 1, ep_rank: int = 0) -> MoEDecoder:
    made = MoEDecoder(
        config, MoEConfig(num_experts=4, moe_ffn_hidden_size=8), ep_size=ep_size, ep_rank=ep_rank
    )
    made.initialise(0)
    return made


SMALL = ModelConfig(num_layers=2, hidden_size=8, num_heads=2, seq_len=LENGTH, vocab_size=VOCABULARY)


def keys(samples: int) -> SampleKeys:
    return SampleKeys(0, torch.arange(samples))


def hidden(gpt: MoEDecoder, tokens_BL: Tensor) -> Tensor:
    """The stream behind the last block, run piece by piece."""
    h_BLM = gpt.embed(tokens_BL, keys(len(tokens_BL)))
    for block in gpt.parts:
        residual_BLM, x_TM = block.attend(h_BLM, keys(len(tokens_BL)))
        out_TM = block.dense(x_TM) if block.moe is None else block.moe(x_TM)
        h_BLM = block.add(residual_BLM, out_TM, keys(len(tokens_BL)))
    return h_BLM


@draws(30)
@given(configs(), st.sampled_from([1, 2, 4]))
def test_every_parameter_stands_once_among_replicated_and_experts(config: ModelConfig, ep_size: int) -> None:
    gpt = model(config, ep_size)
    layers = range(config.num_layers)
    replicated = [id(p) for layer in layers for p in gpt.replicated_parameters(layer)]
    experts = [id(p) for layer in layers for p in gpt.expert_parameters(layer)]
    assert sorted(replicated + experts) == sorted(id(p) for p in gpt.parameters())
    names = {id(p): name for name, p in gpt.named_parameters()}
    assert all(".experts." in names[i] for i in experts)
    assert not any(".experts." in names[i] for i in replicated)
    assert [bool(gpt.expert_parameters(layer)) for layer in layers] == [config.is_moe(i) for i in layers]


@pytest.mark.parametrize("ep_size", [2, 4])
def test_the_experts_of_all_ranks_together_are_those_of_the_model(ep_size: int) -> None:
    whole = model(SMALL)
    ranks = [model(SMALL, ep_size, ep_rank) for ep_rank in range(ep_size)]
    for layer in range(SMALL.num_layers):
        parts = zip(*(rank.expert_parameters(layer) for rank in ranks), strict=True)
        for together, expected in zip(parts, whole.expert_parameters(layer), strict=True):
            assert torch.equal(torch.cat(together), expected)


def test_longer_samples_than_positions_are_refused() -> None:
    gpt = model(SMALL)
    assert gpt.embed(torch.zeros(1, LENGTH, dtype=torch.int64), keys(1)).shape == (1, LENGTH, 8)
    with pytest.raises(ConfigError) as caught:
        gpt.embed(torch.zeros(1, LENGTH + 1, dtype=torch.int64), keys(1))
    assert caught.value.key == "model.seq_len"
    assert caught.value.hint == f"Use {LENGTH + 1}."


def test_no_token_sees_a_later_one() -> None:
    gpt = model(SMALL)
    tokens_BL = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    for changed in range(LENGTH):
        other_BL = tokens_BL.clone()
        other_BL[:, changed] = (other_BL[:, changed] + 1) % VOCABULARY
        before, after = hidden(gpt, tokens_BL), hidden(gpt, other_BL)
        torch.testing.assert_close(before[:, :changed], after[:, :changed])
        assert not torch.allclose(before[:, changed], after[:, changed])


def test_head_sums_over_labels_that_count() -> None:
    gpt = model(SMALL)
    h_BLM = torch.randn(2, LENGTH, 8, generator=torch.Generator().manual_seed(0))
    labels_BL = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    labels_BL[0, :4] = -100
    log_share = gpt.lm_head(gpt.model.norm(h_BLM)).log_softmax(-1).detach()
    expected = 0.0
    for b, row in enumerate(labels_BL.tolist()):
        expected -= sum(float(log_share[b, t, label]) for t, label in enumerate(row) if label >= 0)
    assert gpt.head(h_BLM, labels_BL).item() == pytest.approx(expected, rel=1e-5)
    assert gpt.head(h_BLM, torch.full_like(labels_BL, -100)).item() == 0.0


def test_head_sums_in_float32_for_a_model_in_bfloat16() -> None:
    gpt = model(SMALL).bfloat16()
    loss = gpt.head(torch.ones(1, LENGTH, 8).bfloat16(), torch.zeros(1, LENGTH, dtype=torch.int64))
    assert loss.dtype == torch.float32


@pytest.mark.parametrize(
    "norm", [nn.LayerNorm(8), nn.LayerNorm(8, bias=False), nn.RMSNorm(8), nn.Identity()], ids=str
)
def test_rows_may_be_those_of_the_residual_stream_where_a_plain_norm_is_all_before_experts(
    norm: nn.Module,
) -> None:
    block = model(SMALL).parts[0]
    block.post_attention_layernorm = norm  # type: ignore[assignment]  # a norm is as good as another
    assert block.row_norm is norm


class HalfAdded(Block):
    """A block of one's own."""

    def add(self, residual_BLM: Tensor, out_TM: Tensor, keys: SampleKeys) -> Tensor:
        return super().add(residual_BLM, 0.5 * out_TM, keys)


def half_added(block: Block) -> None:
    block.__class__ = HalfAdded


def added_otherwise(block: Block) -> None:
    block.add = lambda residual_BLM, out_TM, keys: residual_BLM  # type: ignore[method-assign]


def dropped(block: Block) -> None:
    block.mlp_dropout.p = 0.5


def another_norm(norm: nn.Module) -> Callable[[Block], None]:
    return lambda block: setattr(block, "post_attention_layernorm", norm)


def hooked(name: str) -> Callable[[Block], None]:
    return lambda block: getattr(block, name).register_forward_hook(lambda *_: None)


MORE = (
    half_added,
    added_otherwise,
    dropped,
    hooked("mlp_dropout"),
    hooked("post_attention_layernorm"),
    another_norm(nn.LayerNorm((LENGTH, 8))),
    another_norm(nn.Sequential(nn.LayerNorm(8), nn.Dropout(0.5))),
)


@pytest.mark.parametrize("change", MORE)
def test_rows_are_tokens_where_a_block_does_more(change: Callable[[Block], None]) -> None:
    block = model(SMALL).parts[0]
    assert block.row_norm is not None
    change(block)
    assert block.row_norm is None
