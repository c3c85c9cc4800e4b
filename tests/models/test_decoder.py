"""The decoder: its pieces fit together, and its parameters are sorted without gap or overlap."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from penstock.config import ConfigError
from penstock.device import Cpu, device_of, using
from penstock.models import ModelConfig, MoEDecoder
from penstock.models.decoder import Block, CounterDropout, attended, fill_normal
from penstock.moe import MoEConfig, SampleKeys
from penstock.moe.routers import uniform_bits
from tests.support.draws import draws
from tests.support.samples import SHAPE, sample_ids, seeds
from tests.support.samples import keys as keys_of

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
    assert tuple(bool(gpt.expert_parameters(layer)) for layer in layers) == config.has_experts


def test_longer_samples_than_positions_are_refused() -> None:
    gpt = model(SMALL)
    assert gpt.embed(torch.zeros(1, LENGTH, dtype=torch.int64), keys(1)).shape == (1, LENGTH, 8)
    with pytest.raises(ConfigError) as caught:
        gpt.embed(torch.zeros(1, LENGTH + 1, dtype=torch.int64), keys(1))
    assert caught.value.key == "model.seq_len"
    assert caught.value.hint == f"Use {LENGTH + 1}."


class Ungrouped(Cpu):
    """Notes the types in which attention is asked for, and has no kernel for shared heads."""

    def __init__(self) -> None:
        self.asked: list[torch.dtype] = []

    def attends_in_groups(self, device: torch.device, dtype: torch.dtype) -> bool:
        del device
        self.asked.append(dtype)
        return False


def test_heads_that_queries_share_are_repeated_where_no_kernel_reads_them() -> None:
    sizes = {"q": (2, 6, 5, 4), "k": (2, 2, 5, 4), "v": (2, 2, 5, 4)}
    generator = torch.Generator().manual_seed(0)
    heads = [torch.randn(size, generator=generator).requires_grad_() for size in sizes.values()]

    def found() -> list[Tensor]:
        out_BALK = attended(*heads)
        return [out_BALK, *torch.autograd.grad(out_BALK.square().sum(), heads)]

    plain, device = found(), Ungrouped()
    with using(device):
        for ours, theirs in zip(found(), plain, strict=True):
            torch.testing.assert_close(ours, theirs)
        with torch.autocast("cpu", torch.bfloat16):
            assert attended(*heads).dtype == torch.bfloat16
    assert device.asked == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize(
    ("capability", "dtype", "grouped"),
    [((9, 0), torch.bfloat16, True), ((8, 0), torch.float32, False), ((7, 5), torch.float16, False)],
)
def test_gpus_whose_fast_kernels_read_shared_heads(
    capability: tuple[int, int], dtype: torch.dtype, grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    device = torch.device("cuda", 0)
    assert device_of(device).attends_in_groups(device, dtype) == grouped


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


# ---- dropout -----------------------------------------------------------------------------------------------


def ones(samples: int = 5, length: int = 7, hidden: int = 6) -> Tensor:
    return torch.ones(samples, length, hidden)


@given(sample_ids, seeds, st.integers(1, 4))
def test_the_mask_does_not_depend_on_how_the_batch_is_cut(ids: list[int], seed: int, cut: int) -> None:
    dropout = CounterDropout(0.5, place=3)
    whole = dropout(ones(), keys_of(ids, seed))
    parts = [dropout(ones(len(part)), keys_of(part, seed)) for part in (ids[:cut], ids[cut:])]
    assert torch.equal(torch.cat(parts), whole)
    backwards = dropout(ones(), keys_of(ids[::-1], seed))
    assert torch.equal(backwards, whole.flip(0))


@pytest.mark.parametrize("p", [0.05, 0.3, 0.5, 0.9])
def test_the_share_of_zeros_is_p(p: float) -> None:
    out = CounterDropout(p, place=1)(ones(64, 64, 64), keys_of(list(range(64))))
    dropped, count = float((out == 0).double().mean()), out.numel()
    assert abs(dropped - p) < 5 * (p * (1 - p) / count) ** 0.5  # five standard deviations, a fixed draw
    torch.testing.assert_close(out[out != 0], torch.full((1,), 1 / (1 - p)).expand(int((out != 0).sum())))


def test_different_masks_are_independent() -> None:
    """Two places agree on as many elements as two coins would."""
    shape, ids = torch.Size((16, 32, 32)), keys_of(list(range(16)))
    masks = [uniform_bits(shape, place, ids) >= 2**31 for place in range(6)]
    masks.append(uniform_bits(shape, 0, keys_of(list(range(1, 17)))) >= 2**31)
    masks.append(uniform_bits(shape, 0, keys_of(list(range(16)), seed=1)) >= 2**31)
    for i, mask in enumerate(masks):
        for other in masks[:i]:
            agreed = float((mask == other).double().mean())
            assert abs(agreed - 0.5) < 5 * 0.5 / shape.numel() ** 0.5


def test_nothing_happens_in_evaluation_or_without_p() -> None:
    x_BLM = torch.randn(SHAPE)
    assert CounterDropout(0.5, place=0).eval()(x_BLM, keys_of([0, 1, 2, 3, 4])) is x_BLM
    assert CounterDropout(0.0, place=0)(x_BLM, keys_of([0, 1, 2, 3, 4])) is x_BLM


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_gradient_passes_where_the_value_passes(dtype: torch.dtype) -> None:
    x_BLM = torch.ones(SHAPE, dtype=dtype, requires_grad=True)
    out = CounterDropout(0.4, place=0)(x_BLM, keys_of([0, 1, 2, 3, 4]))
    out.sum().backward()
    assert out.dtype == dtype
    assert x_BLM.grad is not None
    assert torch.equal(x_BLM.grad, out.detach())


# ---- initial weights ---------------------------------------------------------------------------------------


MODEL = ModelConfig(num_layers=3, hidden_size=32, num_heads=2, seq_len=8, vocab_size=50, moe_layers=(0, 2))
MOE = MoEConfig(num_experts=8, moe_ffn_hidden_size=24)


def model_of(seed: int, ep_size: int = 1, ep_rank: int = 0) -> MoEDecoder:
    made = MoEDecoder(MODEL, MOE, ep_size=ep_size, ep_rank=ep_rank)
    made.initialise(seed)
    return made


@pytest.mark.parametrize("ep_size", [2, 4, 8])
def test_every_layout_draws_the_same_weights(ep_size: int) -> None:
    whole = dict(model_of(7).named_parameters())
    for ep_rank in range(ep_size):
        mine = model_of(7, ep_size, ep_rank)
        share = MOE.num_experts // ep_size
        for name, parameter in mine.named_parameters():
            expected: Tensor = whole[name]
            if ".experts." in name:
                expected = expected[ep_rank * share : (ep_rank + 1) * share]
            assert torch.equal(parameter, expected), f"{name} on ep_rank {ep_rank}"


def test_no_two_experts_or_layers_are_alike() -> None:
    weights = dict(model_of(7).named_parameters())
    drawn: list[Tensor] = [weights[f"model.layers.{layer}.mlp.experts.w_up"] for layer in (0, 2)]
    experts = torch.cat(drawn).flatten(1)
    assert len(experts.unique(dim=0)) == 2 * MOE.num_experts


def test_the_seed_decides() -> None:
    first, again, other = (dict(model_of(seed).named_parameters()) for seed in (1, 1, 2))
    for name, parameter in first.items():
        assert torch.equal(parameter, again[name])
        if parameter.dim() >= 2:
            assert not torch.equal(parameter, other[name])


def test_scales() -> None:
    """0.02, less for projections into the residual stream; norms start as ones."""
    for name, parameter in model_of(0).named_parameters():
        if name.endswith("norm.weight"):
            assert torch.equal(parameter, torch.ones_like(parameter))
        else:
            small = name.endswith(("self_attn.o_proj.weight", "w_down", "mlp.down_proj.weight"))
            std = 0.02 / math.sqrt(6) if small else 0.02
            assert float(parameter.detach().std()) == pytest.approx(std, rel=0.15), name
            assert abs(float(parameter.detach().mean())) < 5 * std / math.sqrt(parameter.numel()), name


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    fill_normal(torch.empty(5, 5), "name", 0, 1.0)
    assert torch.equal(torch.get_rng_state(), before)


def test_weights_are_the_same_numbers_in_any_type_whatever_the_defaults() -> None:
    single, double = torch.empty(9), torch.empty(9, dtype=torch.float64)
    fill_normal(single, "name", 3, 0.02)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            fill_normal(double, "name", 3, 0.02)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(single.double(), double)


def test_meta_tensors_stay_without_data() -> None:
    with torch.device("meta"):
        made = model_of(0)
    assert all(parameter.is_meta for parameter in made.parameters())
