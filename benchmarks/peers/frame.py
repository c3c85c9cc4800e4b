"""Penstock's decoder around somebody else's MoE layers: the same attention, embedding, head and loss.

Shapes: B samples, L tokens per sample, T = B * L tokens, M hidden size, E experts of this rank.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn

from penstock.lab.bench.config import BenchConfig
from penstock.models import MoEDecoder
from penstock.moe import MoELayer, SampleKeys
from penstock.topology import Layout

Read = Callable[[nn.Parameter], Tensor]
"""A parameter to the tensor that is asked for: itself, or its gradient."""


class PeerLayer(nn.Module):
    """A peer's MoE layer in the place of Penstock's: tokens [T, M] in, tokens [T, M] out."""

    @abstractmethod
    def load(self, ours: MoELayer) -> None:
        """Take over the weights of a Penstock layer."""

    @abstractmethod
    def as_penstock(self, read: Read) -> dict[str, Tensor]:
        """Return what `read` says of every parameter, by the names and in the shapes of Penstock's layer."""


class Frame(nn.Module):
    """A copy of `model` whose MoE layers are the peer's, with the same weights. Returns the mean token loss.

    Gradients of that mean, averaged over ranks, are those of the mean over the whole batch if all ranks have
    equally many labels. The balance and z losses are left out: every system defines them in its own way.
    """

    def __init__(
        self, model: MoEDecoder, config: BenchConfig, layout: Layout, make: Callable[[], PeerLayer]
    ) -> None:
        super().__init__()
        self.decoder = MoEDecoder(config.model, config.moe, ep_size=layout.ep_size, ep_rank=layout.ep_rank)
        self.decoder.load_state_dict(model.state_dict())
        batch = config.compare.batch_per_device
        ids = torch.arange(batch) + layout.rank * batch
        self.keys = SampleKeys(seed=config.compare.seed, sample_ids_B=ids)
        for block in self.decoder.parts:
            if block.moe is not None:
                layer = make()
                layer.load(block.moe)
                block.add_module("mlp", layer)

    def forward(self, tokens_BL: Tensor, labels_BL: Tensor) -> Tensor:
        h_BLM = self.decoder.embed(tokens_BL, self.keys)
        for block in self.decoder.parts:
            residual_BLM, x_TM = block.attend(h_BLM, self.keys)
            h_BLM = block.add(residual_BLM, block.dense(x_TM), self.keys)
        return self.decoder.head(h_BLM, labels_BL) / labels_BL.numel()

    def as_penstock(self, read: Read) -> dict[str, Tensor]:
        """Return what `read` says of every parameter, by the names of Penstock's decoder on this rank."""
        layers = {n: m for n, m in self.decoder.named_modules() if isinstance(m, PeerLayer)}
        tensors: dict[str, Tensor] = {}
        for name, layer in layers.items():
            tensors |= {f"{name}.{key}": value for key, value in layer.as_penstock(read).items()}
        for name, parameter in self.decoder.named_parameters():
            if not name.startswith(tuple(f"{prefix}." for prefix in layers)):
                tensors[name] = read(parameter)
        return tensors
