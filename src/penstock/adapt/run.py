"""A model of transformers as the model of a run: any family, trained by `penstock train` and sessions.

Shapes: B samples, L tokens per sample.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.adapt.build import pieces_of, read_share, skeleton, spread_parts
from penstock.adapt.decoder import Decoder, Inputs
from penstock.adapt.engine import BalanceOverLayers, check_unchanged
from penstock.adapt.saving import ModelNaming
from penstock.adapt.tensor import TensorShares, check_can_narrow
from penstock.config import ConfigError
from penstock.decision import Decision, PlacementConfig
from penstock.device import device_of
from penstock.families.described import GENERATION, quiet, read_generation
from penstock.families.inspection import Found
from penstock.families.sections import coefficient_of, described_in
from penstock.families.weights import QUANTIZED, ModelFolder
from penstock.models.qwen3_moe import CONFIG
from penstock.moe.build import dispatch_of
from penstock.runtime import Machinery, PipelinedStack
from penstock.runtime.features.expert_replicas.manager import ExpertMoving
from penstock.runtime.features.sample_placement import NetMoE, SampleMoving
from penstock.schedule import StepPlan
from penstock.topology import Layout
from penstock.train.assemble import stack_of_run
from penstock.train.checkpoint import COPY, same_files
from penstock.train.config import RunConfig
from penstock.train.model import Files, RunModel, decoder_of


def model_of_run(
    config: RunConfig,
    machinery: Machinery,
    *,
    plan: StepPlan | None,
    moving: ExpertMoving | None,
    begins: bool,
) -> RunModel:
    """Return the model of a run: Penstock's own decoder, or a model of transformers.

    Args:
        plan: The first plan; None = the one that section [schedule] describes.
        moving: How replicas are planned where experts move.
        begins: Whether the decoder begins with the weights in `model.config`, if it has any.

    Raises:
        ConfigError: The model cannot be built from `model.config`, or not on this layout.
    """
    if not config.model.of_transformers:
        return decoder_of(config, machinery, plan=plan, moving=moving, begins=begins)
    layout = machinery.layout  # the folder is read also where a run goes on: no rank draws the model whole
    with machinery.control.waiting(*config.parallel.at_checkpoints):
        found = _built(config, machinery)
    # For dropout and random routers, until a checkpoint is loaded; ranks that share attention draw alike.
    torch.manual_seed(config.train.seed + layout.dp_rank)
    tensor = TensorShares.of(found, layout)
    with pieces_of(found, layout, tensor) as decoder:
        samples = sample_moving_of(config.placement)
        stack = stack_of_run(
            ModelStack,
            found.model,
            decoder,
            found.moe,
            config,
            machinery,
            plan=plan,
            moving=moving,
            samples=samples,
        )
        if tensor is not None:
            tensor.ranks.open(machinery)
    spread_parts(decoder, machinery)
    if tensor is not None:
        tensor.settle()
    stack.minimise(
        replace(found.moe, aux_loss_coeff=config.moe.aux_loss_coeff), BalanceOverLayers(found.top_k)
    )
    stack.train()  # from_pretrained leaves a model in evaluation mode
    return RunModel(
        stack=stack,
        naming=partial(ModelNaming, layout, decoder),
        files=partial(_files, found.model),
        repeats_late=False,  # what backward needs of a step's inputs is freed with its loss
    )


class ModelStack(PipelinedStack):
    """Runs a model of transformers in a loop that gives it tokens and the tokens that follow them."""

    parts: Decoder

    def forward(self, *given: Any, **named: Any) -> Tensor:
        """Return the loss of the whole batch of all ranks; see `PipelinedStack.forward`.

        Raises:
            ValueError: If the model has been changed in a way that a step would miss.
        """
        balances = self.moe.aux_loss_coeff > 0
        check_unchanged(self.parts, balances=balances)
        self.parts.begin(Inputs(routers="balanced" if balances else "unused"))
        loss: Tensor = super().forward(*given, **named)
        self.parts.calls.end_with(loss)
        return loss


def sample_moving_of(placement: PlacementConfig) -> SampleMoving:
    """Return how samples get their homes.

    A model's own routers cannot be asked in advance: which experts follow which tells what samples will want.
    """
    asks = placement.prediction == "next_gate"
    return SampleMoving(NetMoE(placement.solver), "conditional" if asks else placement.prediction)


def _built(config: RunConfig, machinery: Machinery) -> Found:
    """Return the model with this rank's experts, read from its folder, also to go on, or drawn."""
    path, layout, control = config.model.config, machinery.layout, machinery.control
    assert path is not None, "sizes of other architectures come from there"
    stored = same_files(path, control)

    def build() -> Found:
        check_can_narrow(described_in(path), layout.etp_size)
        try:
            if not stored:
                found = _drawn(path, config.train.seed, layout)
            else:
                opened = ModelFolder.open(path)
                kinds = ((name, each.kind.partition("_")[0]) for name, each in opened.tensors.items())
                if (name := next((name for name, kind in kinds if kind in QUANTIZED), None)) is not None:
                    why = f"{name} has numbers of a type in which no model computes"
                    raise ConfigError("model.config", str(path), why, COPY)
                found = read_share(skeleton(opened), opened, layout, torch.float32, machinery.device)
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError("model.config", str(path), str(error)) from error
        return found.of(found.model.to(machinery.device))

    found = control.agreed(build, "building the model of model.config")
    # What the run decides stands in the model, and in its configuration.
    model, coefficient = found.model, config.moe.aux_loss_coeff
    model.config.architectures, model.config.dtype = [type(model).__name__], torch.float32
    if found.family.coefficient is not None and coefficient_of(model, found.family) is not None:
        *holder, name = found.family.coefficient.split(".")
        setattr(model.get_submodule(".".join(holder)), name, coefficient)
        if hasattr(found.config, name):
            setattr(found.config, name, coefficient)
    choice = Decision(dispatch=dispatch_of(config.moe), comm_dtype=config.moe.comm_dtype or "none")
    return replace(found, choice=choice, bound_factor=config.moe.bound_factor)


def _drawn(path: Path, seed: int, layout: Layout) -> Found:
    """Return a model with transformers' initial weights: a rank draws all of them and keeps its share."""
    from transformers import AutoModelForCausalLM

    empty = described_in(path)
    cpu = torch.device("cpu")
    with quiet(), device_of(cpu).fork_random(cpu):
        device_of(cpu).seed(cpu, seed)
        own = copy.deepcopy(empty.model.config)  # others may train a model of the same file
        model = AutoModelForCausalLM.from_config(own, dtype=torch.float32)
    generation = read_generation(path) if path.is_dir() else None
    if generation is not None:
        model.generation_config = generation
    found = empty.of(model)
    found.shares(layout).settle()
    return found


def _files(model: Any, tokenizer: str | None) -> Files:
    """Return the JSON files that transformers reads with the weights."""
    config: dict[str, Any] = json.loads(model.config.to_json_string())
    files: dict[str, dict[str, Any]] = {CONFIG: {**config, "tokenizer_digest": tokenizer}}
    if model.can_generate():
        files[GENERATION] = json.loads(model.generation_config.to_json_string())
    return files
