"""The decoder: architecture and parameter names of Qwen3-MoE, in the pieces that the engine schedules.

Norms are RMSNorm, positions rotary, queries and keys normed by head, feed-forward parts SwiGLU; nothing has a
bias. Gates, experts and losses that Qwen3-MoE lacks stay possible in MoE layers.
Shapes: B samples, L tokens per sample, M hidden size, A heads, G heads of keys and values, K head size, V
vocabulary, T = B * L tokens.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock.config import ConfigError
from penstock.device import device_of
from penstock.mesh import Group
from penstock.models.config import ModelConfig
from penstock.moe import MoEConfig, MoELayer, SampleKeys, build_layer
from penstock.moe.experts import ONE_SHARD, ExpertShard
from penstock.moe.layer import LogicalNames
from penstock.moe.products import computing_type
from penstock.moe.routers import BITS, uniform_bits
from penstock.runtime.batch import check_vocabulary
from penstock.runtime.statistics import cross_entropy_sum
from penstock.sharding import Shard, Sharding, shardings_of


class _Unfilled(TorchFunctionMode):
    """Leaves out functions that fill new parameters: on meta, torch would load its compiler for them."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        given = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return given["tensor"] if "tensor" in given else args[0]
        return func(*args, **given)


@contextmanager
def on_meta() -> Iterator[None]:
    """Put new tensors on the meta device, inside this context, and leave parameters unfilled."""
    with torch.device("meta"), _Unfilled():
        yield


def fill_normal(tensor: Tensor, name: str, seed: int, std: float, sharding: Sharding | None = None) -> None:
    """Fill a tensor with normal numbers from a generator keyed by (seed, name), drawn on the CPU.

    Args:
        std: Standard deviation of the numbers.
        sharding: Which part of a larger tensor this is; the whole tensor is drawn, so that ranks have parts
            of one.
    """
    if tensor.is_meta:
        return
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    shape = tensor.shape if sharding is None else sharding.shape
    with torch.no_grad():  # in this type and place, whatever the program's defaults are
        whole = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") * std
        tensor.copy_(whole if sharding is None else sharding.part(whole))


INITIAL_STD = 0.02
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.Identity)
"""Norms whose output for a row of the residual stream does not depend on other rows."""

AROUND_EXPERTS = ("attend", "settle", "add")
"""Methods that a block runs before and after its experts."""

MakeLayer = Callable[[int], MoELayer]


class TensorShard(Shard):
    """The place of this rank among `size` ranks that share heads, dense widths and vocabulary."""

    axes = Group.TENSOR


WHOLE = TensorShard()


class CounterDropout(nn.Module):
    """Zeroes a share `p` of the elements in training, scales the rest by 1 / (1 - p).

    The mask of an element is a hash of run, place in the model and sample, not of what was drawn before it.
    So it does not depend on microbatches, on the rank a sample lives on, or on the order of tasks.

    Attributes:
        p: Share of the elements that become zero.
        place: A number that no other dropout of the model has.
    """

    def __init__(self, p: float, place: int) -> None:
        super().__init__()
        self.p, self.place = p, place

    def forward(self, x_BLM: Tensor, keys: SampleKeys) -> Tensor:
        if not self.training or self.p == 0.0:
            return x_BLM
        keep_BLM = uniform_bits(x_BLM.shape, self.place, keys) >= round(self.p * 2**BITS)
        dropped_BLM: Tensor = x_BLM * keep_BLM / (1 - self.p)
        return dropped_BLM


class Rotary(nn.Module):
    """Rotary positions: turns the heads of every token by angles that grow with its place.

    Angles are computed in float32, as transformers does, and rounded to the type of the heads. They are made
    when they are first used, and kept: no checkpoint holds them, and a model without memory has none.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.size, self.places, self.theta = config.head_size, config.seq_len, config.rope_theta
        self._kept: tuple[Tensor, Tensor] | None = None

    def forward(self, heads_BHLK: Tensor, documents_BL: Tensor | None) -> Tensor:
        """Turn the pairs of numbers in every head, which lie half a head apart.

        Args:
            heads_BHLK: Queries and keys, all heads at once, as each operation costs a launch on a GPU.
            documents_BL: Place of the first token of every token's document; None = a sample is one document.
        """
        kept, device, dtype = self._kept, heads_BHLK.device, heads_BHLK.dtype
        if kept is None or (kept[0].device, kept[0].dtype) != (device, dtype):
            with torch.inference_mode(False), torch.no_grad():  # training reads them as well
                evens_H = torch.arange(0, self.size, 2, dtype=torch.float32, device=device)
                rates_H = 1.0 / self.theta ** (evens_H / self.size)
                places_L = torch.arange(self.places, dtype=torch.float32, device=device)
                angles_LH = places_L.unsqueeze(1) * rates_H
                cos_LH, sin_LH = angles_LH.cos(), angles_LH.sin()
                # Sines of the first half are negative: (a, b) becomes (a cos - b sin, b cos + a sin).
                pair = torch.cat((cos_LH, cos_LH), 1), torch.cat((-sin_LH, sin_LH), 1)
                kept = self._kept = pair[0].to(dtype), pair[1].to(dtype)
        length, (cos_LK, sin_LK) = heads_BHLK.shape[2], kept
        cos, sin = cos_LK[:length], sin_LK[:length]
        if documents_BL is not None:
            places_BL = torch.arange(length, device=documents_BL.device) - documents_BL
            cos, sin = (each[places_BL].unsqueeze(1) for each in (cos_LK, sin_LK))
        return torch.addcmul(heads_BHLK * cos, heads_BHLK.roll(self.size // 2, -1), sin)


class HeadNorm(nn.RMSNorm):
    """The norm of single heads, in the type of its weight: autocast gives it projections in bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


def attended(q_BALK: Tensor, k_BGLK: Tensor, v_BGLK: Tensor, mask_BALL: Tensor | None = None) -> Tensor:
    """Return the values of all heads, mixed by causal attention [B, A, L, K].

    Heads of keys and values that several queries share are repeated where no fast kernel would read them.

    Args:
        mask_BALL: Which tokens a token attends to; None = those up to itself.
    """
    times = q_BALK.shape[1] // k_BGLK.shape[1]
    grouped = times > 1 and mask_BALL is None  # with a mask no fast kernel of a GPU takes grouped heads
    grouped = grouped and device_of(q_BALK).attends_in_groups(q_BALK.device, computing_type(q_BALK))
    if times > 1 and not grouped:
        k_BGLK, v_BGLK = (each.repeat_interleave(times, dim=1) for each in (k_BGLK, v_BGLK))
    causal = mask_BALL is None
    return F.scaled_dot_product_attention(
        q_BALK, k_BGLK, v_BGLK, attn_mask=mask_BALL, is_causal=causal, enable_gqa=grouped
    )


class Attention(nn.Module):
    """Causal grouped-query attention with normed queries and keys; a shard has some heads, and returns a
    partial sum."""

    def __init__(self, config: ModelConfig, rotary: Rotary, shard: TensorShard = WHOLE) -> None:
        super().__init__()
        hidden, self.head_size = config.hidden_size, config.head_size
        sizes = {"q": config.attention_size, "k": config.key_value_size, "v": config.key_value_size}
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(hidden, size // shard.size, bias=False) for size in sizes.values()
        )
        self.o_proj = nn.Linear(config.attention_size // shard.size, hidden, bias=False)
        self.q_norm = HeadNorm(self.head_size, config.rms_norm_eps)
        self.k_norm = HeadNorm(self.head_size, config.rms_norm_eps)
        self.rotary = rotary
        cut = {f"{name}_proj.weight": shard.cut(0, (size, hidden)) for name, size in sizes.items()}
        cut["o_proj.weight"] = shard.cut(1, (hidden, config.attention_size))
        self.shardings = shard.among(cut)

    def forward(self, x_BLM: Tensor, documents_BL: Tensor | None = None) -> Tensor:
        """Attend to the tokens of a sample up to each one.

        Args:
            documents_BL: Place of the first token of every token's document, to which alone it attends; None
                = a sample is one document.
        """
        q_BALK = self.q_norm(self._heads(self.q_proj(x_BLM))).transpose(1, 2)
        k_BGLK = self.k_norm(self._heads(self.k_proj(x_BLM))).transpose(1, 2)
        v_BGLK = self._heads(self.v_proj(x_BLM)).transpose(1, 2)
        heads_BHLK = self.rotary(torch.cat((q_BALK, k_BGLK), dim=1), documents_BL)
        q_BALK, k_BGLK = heads_BHLK.split((q_BALK.shape[1], k_BGLK.shape[1]), dim=1)
        mask_BALL: Tensor | None = None
        if documents_BL is not None:  # a token attends to those of its document up to itself
            mask_BALL = (documents_BL.unsqueeze(2) == documents_BL.unsqueeze(1)).tril().unsqueeze(1)
        mixed_BALK = attended(q_BALK, k_BGLK, v_BGLK, mask_BALL)
        out_BLM: Tensor = self.o_proj(mixed_BALK.transpose(1, 2).flatten(2))
        return out_BLM

    def _heads(self, x_BLN: Tensor) -> Tensor:
        heads = x_BLN.shape[-1] // self.head_size  # no -1: there may be no sample
        x_BLAK: Tensor = x_BLN.unflatten(-1, (heads, self.head_size))
        return x_BLAK


class FeedForward(nn.Module):
    """The feed-forward part of a dense block: SwiGLU, silu(gate) * up, then down.

    Each shard has a part of the hidden width, and returns a partial sum.
    """

    def __init__(self, config: ModelConfig, shard: TensorShard = WHOLE) -> None:
        super().__init__()
        hidden, wide = config.hidden_size, config.dense_hidden_size
        self.gate_proj = nn.Linear(hidden, wide // shard.size, bias=False)
        self.up_proj = nn.Linear(hidden, wide // shard.size, bias=False)
        self.down_proj = nn.Linear(wide // shard.size, hidden, bias=False)
        inward, back = shard.cut(0, (wide, hidden)), shard.cut(1, (hidden, wide))
        self.shardings = shard.among(
            {"gate_proj.weight": inward, "up_proj.weight": inward, "down_proj.weight": back}
        )

    def forward(self, x_TM: Tensor) -> Tensor:
        out_TM: Tensor = self.down_proj(F.silu(self.gate_proj(x_TM)) * self.up_proj(x_TM))
        return out_TM


class VocabularyShard(nn.Embedding):
    """The embedding of this rank's part of the vocabulary: other tokens get zeros."""

    def __init__(self, config: ModelConfig, shard: TensorShard) -> None:
        super().__init__(config.vocab_size // shard.size, config.hidden_size)
        self.first, self.vocabulary = shard.rank * self.num_embeddings, config.vocab_size

    def forward(self, input: Tensor) -> Tensor:  # torch's name
        check_vocabulary("token", input, self.vocabulary)
        return held_rows(input, self.weight, self.first)


def held_rows(tokens_BL: Tensor, weight_VM: Tensor, first: int, padding: int | None = None) -> Tensor:
    """Return the embeddings [B, L, M] of the tokens of this rank's vocabulary, and zeros for all others.

    Args:
        tokens_BL: Tokens of the whole vocabulary.
        weight_VM: The rows of this rank.
        first: The token of the first row.
        padding: The row that gets no gradient; None = all get one.
    """
    places_BL = tokens_BL - first
    here_BL = (places_BL >= 0) & (places_BL < len(weight_VM))
    rows_BLM = F.embedding(places_BL.where(here_BL, places_BL.new_zeros(())), weight_VM, padding)
    return rows_BLM * here_BL.unsqueeze(-1)


class Block(nn.Module):
    """Pre-norm block: attention, then an MoE layer or a dense feed-forward part.

    A transfer may cut it after `attend` and before `add`; see `penstock.runtime.parts`.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        make_moe: MakeLayer,
        rotary: Rotary,
        shard: TensorShard = WHOLE,
    ) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, rotary, shard)
        self.attention_dropout = CounterDropout(config.dropout, place=2 * layer + 1)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp_dropout = CounterDropout(config.dropout, place=2 * layer + 2)
        self.mlp: MoELayer | FeedForward
        self.mlp = make_moe(layer) if config.has_experts[layer] else FeedForward(config, shard)

    @property
    def moe(self) -> MoELayer | None:
        return self.mlp if isinstance(self.mlp, MoELayer) else None

    @property
    def row_norm(self) -> nn.Module | None:
        norm, dropout = self.post_attention_layernorm, self.mlp_dropout
        hooked = self.moe is not None and bool(self.moe.hooks)
        usual = all(_function(getattr(self, name)) is getattr(Block, name) for name in AROUND_EXPERTS)
        adds = _computes_as(dropout, CounterDropout) and dropout.p == 0
        alone = _computes_as(norm, *NORMS) and len(getattr(norm, "normalized_shape", (0,))) == 1
        return norm if usual and adds and alone and not hooked else None

    def attend(self, h_BLM: Tensor, keys: SampleKeys) -> tuple[Tensor, Tensor]:
        return self.settle(h_BLM, self.mix(h_BLM, keys), keys)

    def mix(self, h_BLM: Tensor, keys: SampleKeys) -> Tensor:
        documents = () if keys.documents_BL is None else (keys.documents_BL,)  # a wrapper may take none
        attended_BLM = self.self_attn(self.input_layernorm(h_BLM), *documents)
        mixed_BLM: Tensor = self.attention_dropout(attended_BLM, keys)
        return mixed_BLM

    def settle(self, h_BLM: Tensor, attended_BLM: Tensor, keys: SampleKeys) -> tuple[Tensor, Tensor]:
        del keys
        residual_BLM = h_BLM + attended_BLM
        return residual_BLM, self.post_attention_layernorm(residual_BLM).flatten(0, 1)

    def add(self, residual_BLM: Tensor, out_TM: Tensor, keys: SampleKeys) -> Tensor:
        added: Tensor = self.mlp_dropout(out_TM.view_as(residual_BLM), keys)
        return residual_BLM + added

    def dense(self, x_TM: Tensor) -> Tensor:
        out_TM: Tensor = self.mlp(x_TM)
        return out_TM


class Trunk(nn.Module):
    """The decoder without its head, which has a module of its own in Qwen3-MoE."""

    def __init__(self, config: ModelConfig, make_moe: MakeLayer, shard: TensorShard) -> None:
        super().__init__()
        vocabulary, rotary = (config.vocab_size, config.hidden_size), Rotary(config)
        self.embed_tokens = VocabularyShard(config, shard) if shard.size > 1 else nn.Embedding(*vocabulary)
        self.layers = nn.ModuleList(
            Block(config, layer, make_moe, rotary, shard) for layer in range(config.num_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)


class MoEDecoder(nn.Module):
    """The decoder. Its experts are those of one rank: `num_experts / ep_size` per MoE layer.

    Args:
        node_size: See `build_layer`.
        make_moe: Makes the MoE layer of a block from its number; None = `moe` describes the layers.
        shard: Which part of heads, dense widths and vocabulary this rank has.
        expert_shard: Which part of every expert this rank has.
    """

    separates_documents = True

    def __init__(
        self,
        config: ModelConfig,
        moe: MoEConfig,
        *,
        ep_size: int = 1,
        ep_rank: int = 0,
        node_size: int = 1,
        make_moe: MakeLayer | None = None,
        shard: TensorShard = WHOLE,
        expert_shard: ExpertShard = ONE_SHARD,
    ) -> None:
        super().__init__()
        if make_moe is None:
            given = {"ep_size": ep_size, "ep_rank": ep_rank, "node_size": node_size, "shard": expert_shard}
            make_moe = partial(_moe_layer, config.hidden_size, moe, given)
        self.config, self.moe, self.shard = config, moe, shard
        self.model = Trunk(config, make_moe, shard)
        self.embedding_dropout = CounterDropout(config.dropout, place=0)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size // shard.size, bias=False)
        rows = shard.cut(0, (config.vocab_size, config.hidden_size))
        self.shardings = shard.among({"model.embed_tokens.weight": rows, "lm_head.weight": rows})
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def parts(self) -> Sequence[Block]:
        return cast(Sequence[Block], self.model.layers)  # the present blocks: one may have been replaced

    def initialise(self, seed: int) -> None:
        """Fill all weights, equally for any layout. Projections into the residual stream are smaller."""
        shardings, names = shardings_of(self), LogicalNames(self)
        for name, parameter in self.named_parameters():
            # Vectors of equal elements (norms, biases, temperatures) keep PyTorch's initial ones and zeros.
            # Any other parameter came from this process's generator, and would differ between layouts.
            is_constant = parameter.dim() < 2 and (parameter.is_meta or parameter.unique().numel() <= 1)
            if is_constant or name.endswith(".noise_weight"):  # a noisy gate starts without noise
                continue
            into_residual = name.endswith(("self_attn.o_proj.weight", "w_down", "mlp.down_proj.weight"))
            std = INITIAL_STD / math.sqrt(2 * self.config.num_layers) if into_residual else INITIAL_STD
            for logical, weight in names.split(name, parameter):
                fill_normal(weight, logical, seed, std, shardings.get(name))

    def logical(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """Return what belongs to a parameter by the names that one process has for it; see `LogicalNames`."""
        return LogicalNames(self).split(name, tensor)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        """Return the logits [B, L, V] of a whole model, on one process and without a schedule."""
        keys = SampleKeys(0, torch.arange(len(tokens_BL), device=tokens_BL.device))
        h_BLM = self.embed(tokens_BL, keys)
        for block in self.parts:
            residual_BLM, x_TM = block.attend(h_BLM, keys)
            out_TM = block.dense(x_TM) if block.moe is None else block.moe(x_TM.view_as(residual_BLM))
            h_BLM = block.add(residual_BLM, out_TM, keys)
        return self.logits(h_BLM).view(*tokens_BL.shape, -1)

    def embed(self, tokens_BL: Tensor, keys: SampleKeys) -> Tensor:
        length = tokens_BL.shape[1]
        if length > self.config.seq_len:
            raise ConfigError(
                "model.seq_len", self.config.seq_len, f"samples have {length} tokens", f"Use {length}."
            )
        try:
            h_BLM: Tensor = self.model.embed_tokens(tokens_BL)
        except IndexError:
            check_vocabulary("token", tokens_BL, self.config.vocab_size)
            raise
        dropped: Tensor = self.embedding_dropout(h_BLM, keys)
        return dropped

    def head(self, h_BLM: Tensor, labels_BL: Tensor) -> Tensor:
        return cross_entropy_sum(self.logits(h_BLM), labels_BL.flatten())

    def logits(self, h_BLM: Tensor) -> Tensor:
        logits_TV: Tensor = self.lm_head(self.model.norm(h_BLM)).flatten(0, 1)
        return logits_TV

    def partial_parameters(self, layer: int) -> list[nn.Parameter]:
        block = self.parts[layer]
        cut = shardings_of(block.self_attn).keys()
        parameters = [each for name, each in block.self_attn.named_parameters() if name not in cut]
        parameters += block.input_layernorm.parameters()
        if layer == self.config.num_layers - 1:
            parameters += self.model.norm.parameters()
        return parameters

    def token_parameters(self, layer: int) -> list[nn.Parameter]:
        block = self.parts[layer]
        parameters = list(block.post_attention_layernorm.parameters())
        if block.moe is not None:
            experts = {id(p) for p in self.expert_parameters(layer)}
            parameters += [p for p in block.moe.parameters() if id(p) not in experts]
        return parameters

    def replicated_parameters(self, layer: int) -> list[nn.Parameter]:
        experts = {id(p) for p in self.expert_parameters(layer)}
        parameters = [p for p in self.model.layers[layer].parameters() if id(p) not in experts]
        if layer == 0:
            parameters += self.model.embed_tokens.parameters()
        if layer == self.config.num_layers - 1:
            parameters += [*self.model.norm.parameters(), *self.lm_head.parameters()]
        return parameters

    def expert_parameters(self, layer: int) -> list[nn.Parameter]:
        moe = self.parts[layer].moe
        return [] if moe is None else list(moe.experts.parameters())


def _computes_as(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Return whether a module computes just what one of these classes does: no own `forward`, and no hook."""
    hooks = (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    )
    return _function(module.forward) in [kind.forward for kind in kinds] and not any(hooks)


def _function(method: object) -> object:
    """Return the function that a bound method calls; None for what an instance was given in its place."""
    return getattr(method, "__func__", None)


def _moe_layer(hidden_size: int, moe: MoEConfig, given: Mapping[str, Any], layer: int) -> MoELayer:
    return build_layer(hidden_size, moe, layer=layer, **given)
