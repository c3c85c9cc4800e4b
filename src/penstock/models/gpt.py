"""A GPT-style decoder with MoE layers, in the pieces that the engine schedules.

Shapes: B samples, L tokens per sample, M hidden size, A heads, K head size, V vocabulary, T = B * L tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.config import ConfigError
from penstock.mesh import Group
from penstock.models.config import ModelConfig
from penstock.models.dropout import CounterDropout
from penstock.models.initialise import fill_normal
from penstock.moe import MoEConfig, MoELayer, SampleKeys, build_layer
from penstock.moe.experts.base import ONE_SHARD, ExpertShard
from penstock.runtime.checks.samples import check_vocabulary
from penstock.runtime.cross_entropy import cross_entropy_sum
from penstock.sharding import Shard, Sharding, shardings_of

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


class Attention(nn.Module):
    """Causal multi-head attention, 4 M^2 parameters; a shard has some heads, and returns a partial sum."""

    def __init__(self, config: ModelConfig, shard: TensorShard = WHOLE) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.heads = config.num_heads // shard.size
        width = hidden // shard.size
        self.qkv = nn.Linear(hidden, 3 * width, bias=False)
        self.out = nn.Linear(width, hidden, bias=False)
        self.shardings = shard.among(
            {
                "qkv.weight": shard.cut(1, (3 * hidden, hidden), (3, hidden, hidden)),
                "out.weight": shard.cut(1, (hidden, hidden)),
            }
        )

    def forward(self, x_BLM: Tensor, documents_BL: Tensor | None = None) -> Tensor:
        """Attend to the tokens of a sample up to each one.

        documents_BL: where every token's document begins; tokens attend to their own document alone.
        """
        batch, length, _ = x_BLM.shape
        width = self.out.in_features
        sizes = (batch, length, 3, self.heads, width // self.heads)  # no -1: there may be no sample
        qkv_3BALK = self.qkv(x_BLM).view(sizes).permute(2, 0, 3, 1, 4)
        q_BALK, k_BALK, v_BALK = qkv_3BALK.unbind()
        mask_BALL = None if documents_BL is None else _seen(documents_BL).unsqueeze(1)
        mixed_BALK = F.scaled_dot_product_attention(
            q_BALK, k_BALK, v_BALK, attn_mask=mask_BALL, is_causal=mask_BALL is None
        )
        out_BLM: Tensor = self.out(mixed_BALK.transpose(1, 2).reshape(batch, length, width))
        return out_BLM


def _seen(documents_BL: Tensor) -> Tensor:
    """Return which tokens each token attends to, bool [B, L, L]: those of its document up to itself."""
    return (documents_BL.unsqueeze(2) == documents_BL.unsqueeze(1)).tril()


class FeedForward(nn.Module):
    """The feed-forward part of a dense block: two matrices with GELU between.

    Each shard has a part of the hidden width, and returns a partial sum.
    """

    def __init__(self, config: ModelConfig, shard: TensorShard = WHOLE) -> None:
        super().__init__()
        hidden, wide = config.hidden_size, config.dense_hidden_size
        self.up = nn.Linear(hidden, wide // shard.size, bias=False)
        self.down = nn.Linear(wide // shard.size, hidden, bias=False)
        self.shardings = shard.among(
            {"up.weight": shard.cut(0, (wide, hidden)), "down.weight": shard.cut(1, (hidden, wide))}
        )

    def forward(self, x_TM: Tensor) -> Tensor:
        out_TM: Tensor = self.down(F.gelu(self.up(x_TM)))
        return out_TM


class VocabularyShard(nn.Embedding):
    """The embedding of this rank's part of the vocabulary: other tokens get zeros."""

    def __init__(self, config: ModelConfig, shard: TensorShard) -> None:
        super().__init__(config.vocab_size // shard.size, config.hidden_size)
        self.first, self.vocabulary = shard.rank * self.num_embeddings, config.vocab_size

    def forward(self, input: Tensor) -> Tensor:  # torch's name
        check_vocabulary("token", input, self.vocabulary)
        places_BL = input - self.first
        here_BL = (places_BL >= 0) & (places_BL < self.num_embeddings)
        rows_BLM = super().forward(places_BL.where(here_BL, places_BL.new_zeros(())))
        return rows_BLM * here_BL.unsqueeze(-1)


class Block(nn.Module):
    """Pre-norm block: attention, then an MoE layer or a dense feed-forward part.

    A transfer may cut it after `attend` and before `add`; see `penstock.runtime.parts`.
    """

    def __init__(
        self, config: ModelConfig, layer: int, make_moe: MakeLayer, shard: TensorShard = WHOLE
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size)
        self.attention = Attention(config, shard)
        self.attention_dropout = CounterDropout(config.dropout, place=2 * layer + 1)
        self.feed_forward_norm = nn.LayerNorm(config.hidden_size)
        self.feed_forward_dropout = CounterDropout(config.dropout, place=2 * layer + 2)
        self.feed_forward: MoELayer | FeedForward
        if config.is_moe(layer):
            self.feed_forward = make_moe(layer)
        else:
            self.feed_forward = FeedForward(config, shard)

    @property
    def moe(self) -> MoELayer | None:
        return self.feed_forward if isinstance(self.feed_forward, MoELayer) else None

    @property
    def row_norm(self) -> nn.Module | None:
        norm, dropout = self.feed_forward_norm, self.feed_forward_dropout
        hooked = self.moe is not None and self.moe.hooks.any
        usual = all(_function(getattr(self, name)) is getattr(Block, name) for name in AROUND_EXPERTS)
        adds = _computes_as(dropout, CounterDropout) and dropout.p == 0
        alone = _computes_as(norm, *NORMS) and len(getattr(norm, "normalized_shape", (0,))) == 1
        return norm if usual and adds and alone and not hooked else None

    def attend(self, h_BLM: Tensor, keys: SampleKeys) -> tuple[Tensor, Tensor]:
        return self.settle(h_BLM, self.mix(h_BLM, keys))

    def mix(self, h_BLM: Tensor, keys: SampleKeys) -> Tensor:
        documents = () if keys.documents_BL is None else (keys.documents_BL,)  # a wrapper may take none
        attended_BLM = self.attention(self.attention_norm(h_BLM), *documents)
        mixed_BLM: Tensor = self.attention_dropout(attended_BLM, keys)
        return mixed_BLM

    def settle(self, h_BLM: Tensor, attended_BLM: Tensor) -> tuple[Tensor, Tensor]:
        residual_BLM = h_BLM + attended_BLM
        return residual_BLM, self.feed_forward_norm(residual_BLM).flatten(0, 1)

    def add(self, residual_BLM: Tensor, out_TM: Tensor, keys: SampleKeys) -> Tensor:
        added: Tensor = self.feed_forward_dropout(out_TM.view_as(residual_BLM), keys)
        return residual_BLM + added

    def dense(self, x_TM: Tensor) -> Tensor:
        out_TM: Tensor = self.feed_forward(x_TM)
        return out_TM


class GPT(nn.Module):
    """The decoder. Its experts are those of one rank: `num_experts / ep_size` per MoE layer.

    node_size: see `build_layer`. make_moe: makes the MoE layer of a block from its number; without it `moe`
    describes the layers. shard: which part of heads, dense widths and vocabulary this rank has. expert_shard:
    which part of every expert.
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
            make_moe = partial(_layer_of, config.hidden_size, moe, ep_size, ep_rank, node_size, expert_shard)
        self.config, self.shard = config, shard
        vocabulary = (config.vocab_size, config.hidden_size)
        self.token_embedding = VocabularyShard(config, shard) if shard.size > 1 else nn.Embedding(*vocabulary)
        self.position_embedding = nn.Embedding(config.seq_len, config.hidden_size)
        self.embedding_dropout = CounterDropout(config.dropout, place=0)
        self.blocks = nn.ModuleList(Block(config, i, make_moe, shard) for i in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.hidden_size)
        self.output = nn.Linear(config.hidden_size, config.vocab_size // shard.size, bias=False)
        rows = shard.cut(0, vocabulary)
        self.shardings = shard.among({"token_embedding.weight": rows, "output.weight": rows})
        if config.tie_word_embeddings:
            self.output.weight = self.token_embedding.weight

    @property
    def parts(self) -> Sequence[Block]:
        return cast(Sequence[Block], self.blocks)  # the present blocks: one may have been replaced

    def initialise(self, seed: int) -> None:
        """Fill all weights, equally for any layout. Projections into the residual stream are smaller."""
        shardings = shardings_of(self)
        for name, parameter in self.named_parameters():
            if name.endswith(".noise_weight") or _is_constant(parameter):
                continue  # norms keep PyTorch's initial ones and zeros, and a noisy gate starts without noise
            into_residual = name.endswith(("attention.out.weight", "w_down", "feed_forward.down.weight"))
            std = INITIAL_STD / math.sqrt(2 * self.config.num_layers) if into_residual else INITIAL_STD
            if ".experts." in name:
                self._fill_experts(name, parameter, seed, std, shardings.get(name))
            else:
                fill_normal(parameter, name, seed, std, shardings.get(name))

    def _fill_experts(
        self, name: str, parameter: Tensor, seed: int, std: float, sharding: Sharding | None
    ) -> None:
        moe = self.parts[int(name.split(".")[1])].moe
        assert moe is not None, name
        for logical, weight in moe.by_number(name, parameter):
            fill_normal(weight, logical, seed, std, sharding)

    def embed(self, tokens_BL: Tensor, keys: SampleKeys) -> Tensor:
        length = tokens_BL.shape[1]
        if length > self.config.seq_len:
            raise ConfigError(
                "model.seq_len", self.config.seq_len, f"samples have {length} tokens", f"Use {length}."
            )
        positions = torch.arange(length, device=tokens_BL.device)
        if keys.documents_BL is not None:
            positions = positions - keys.documents_BL
        h_BLM = self.token_embedding(tokens_BL)
        if self.shard.rank == 0:  # rows of shards are summed, so only one shard adds positions
            h_BLM = h_BLM + self.position_embedding(positions)
        dropped: Tensor = self.embedding_dropout(h_BLM, keys)
        return dropped

    def head(self, h_BLM: Tensor, labels_BL: Tensor) -> Tensor:
        return cross_entropy_sum(self.logits(h_BLM), labels_BL.flatten())

    def logits(self, h_BLM: Tensor) -> Tensor:
        logits_TV: Tensor = self.output(self.final_norm(h_BLM)).flatten(0, 1)
        return logits_TV

    def partial_parameters(self, layer: int) -> list[nn.Parameter]:
        found = list(self.parts[layer].attention_norm.parameters())
        if layer == 0:
            found += self.position_embedding.parameters()
        if layer == self.config.num_layers - 1:
            found += self.final_norm.parameters()
        return found

    def token_parameters(self, layer: int) -> list[nn.Parameter]:
        block = self.parts[layer]
        found = list(block.feed_forward_norm.parameters())
        if block.moe is not None:
            experts = {id(p) for p in self.expert_parameters(layer)}
            found += [p for p in block.moe.parameters() if id(p) not in experts]
        return found

    def replicated_parameters(self, layer: int) -> list[nn.Parameter]:
        experts = {id(p) for p in self.expert_parameters(layer)}
        found = [p for p in self.blocks[layer].parameters() if id(p) not in experts]
        if layer == 0:
            found += [*self.token_embedding.parameters(), *self.position_embedding.parameters()]
        if layer == self.config.num_layers - 1:
            found += [*self.final_norm.parameters(), *self.output.parameters()]
        return found

    def expert_parameters(self, layer: int) -> list[nn.Parameter]:
        moe = self.parts[layer].moe
        return [] if moe is None else list(moe.experts.parameters())


def _is_constant(parameter: Tensor) -> bool:
    """Return whether a vector or number has equal elements, as norms, biases and temperatures have at first.

    Any other parameter came from this process's generator, and would differ between layouts.
    """
    return parameter.dim() < 2 and (parameter.is_meta or parameter.unique().numel() <= 1)


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


def _layer_of(
    hidden_size: int,
    moe: MoEConfig,
    ep_size: int,
    ep_rank: int,
    node_size: int,
    shard: ExpertShard,
    layer: int,
) -> MoELayer:
    return build_layer(
        hidden_size, moe, ep_size=ep_size, ep_rank=ep_rank, node_size=node_size, layer=layer, shard=shard
    )
