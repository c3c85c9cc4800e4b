"""The Trainer of transformers for scheduled models, on any number of ranks.

With `Trainer` itself a scheduled model trains on one process; on several processes the model would be wrapped
and saved as if every rank had all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer

from penstock.adapt.checkpoint import load_optimizer, save_optimizer
from penstock.adapt.loading import reload
from penstock.adapt.scheduled import engine_of, is_wrapped_by_peft, refuse_sharing
from penstock.runtime import clip_grad_norm_
from penstock.runtime.checks.optimizers import check_optimizer
from penstock.writing import replacing

SCHEDULER = "scheduler.pt"


class ScheduledTrainer(Trainer):
    """`Trainer(model, args, ...)` with a model that `parallelize` or `load_pretrained` has returned.

    Every rank takes its own part of every batch, the loss is that of the batch of all ranks, and checkpoints
    are whole: a run may continue on another number of ranks (`train(resume_from_checkpoint=...)`).
    """

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.prepare_model = lambda model, *_, **__: model  # gradients are synchronised already

    def train(self, *arguments: Any, **named: Any) -> Any:
        """Train. Raises ValueError for settings with which something else would be trained.

        These are: ranks that accelerate does not see, which would all get the same data, losses averaged by
        rank, other losses, scaled ones of float16, other tools that spread the model, and a compiler.
        """
        for is_refused, why in self._refusals():
            if is_refused:
                raise ValueError(why)
        return super().train(*arguments, **named)

    def _refusals(self) -> Iterator[tuple[bool, str]]:
        """Yield conditions under which nothing is trained, and what is said of them."""
        refuse_sharing(engine_of(self.model), "ScheduledTrainer")
        seen, ranks, given = (
            self.accelerator.num_processes,
            engine_of(self.model).layout.world_size,
            self.args,
        )
        in_step = (
            "it makes another loss of the model's logits, and a scheduled model computes its own, the "
            "cross-entropy of its labels, inside the step; leave it out"
        )
        yield (
            seen != ranks,
            f"accelerate sees {seen} of {ranks} processes: start them with torchrun or accelerate launch, so "
            "that each takes its own part of the data",
        )
        yield (
            ranks > 1 and not given.average_tokens_across_devices,
            "average_tokens_across_devices = False: the loss of a scheduled model is that of all ranks' "
            "batch, whose tokens count alike; leave it True",
        )
        yield (
            self.label_smoother is not None,
            f"label_smoothing_factor = {given.label_smoothing_factor}: {in_step}",
        )
        yield self.compute_loss_func is not None, f"compute_loss_func: {in_step}"
        yield (
            self.is_fsdp_enabled or self.is_deepspeed_enabled,
            "fsdp or deepspeed would spread the parameters of a model that is spread already: leave it out",
        )
        yield (
            given.fp16,
            "fp16 = True: it scales losses, and ranks with different experts would not skip the same steps; "
            "use bf16",
        )
        yield (
            given.torch_compile,
            "torch_compile = True: a step runs the model in parts, which a compiler around the whole would "
            "never see, so nothing would be compiled; leave it False",
        )

    def create_optimizer(self, *arguments: Any, **named: Any) -> Any:
        """Create the optimiser. Raises ValueError for one that needs more of a tensor than a rank has."""
        found = super().create_optimizer(*arguments, **named)
        check_optimizer(_plain(found))
        return found

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> Any:
        """Return accelerate's context, which otherwise is in the wrapper of a model that it prepares."""
        del cache_enabled
        return self.accelerator.autocast()

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss of a step, without Trainer's factor of the ranks, which undoes a wrapper's average.

        In evaluation the loss is that of this rank's samples, and Trainer itself averages.
        """
        found = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if num_items_in_batch is None or not model.training:
            return found
        ranks = self.accelerator.num_processes
        return (found[0] / ranks, found[1]) if return_outputs else found / ranks

    def _clip_grad_norm(self, model: Any) -> Tensor:
        return clip_grad_norm_(model, self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return clip_grad_norm_(model, float("inf")) if grad_norm is None else grad_norm

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if self.args.should_save:
            super()._save(output_dir, state_dict)
        else:  # all ranks bring their experts
            folder = self.args.output_dir if output_dir is None else output_dir
            self.model.save_pretrained(folder, is_main_process=False)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save_optimizer(self.model, _plain(self.optimizer), output_dir)
        if self.args.should_save:
            with replacing(Path(output_dir) / SCHEDULER) as file:
                torch.save(self.lr_scheduler.state_dict(), file)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            load_optimizer(self.model, _plain(self.optimizer), checkpoint)
            scheduler = torch.load(Path(checkpoint) / SCHEDULER, weights_only=True)
            self.lr_scheduler.load_state_dict(scheduler)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        model = self.model if model is None else model
        if is_wrapped_by_peft(model):  # every rank reads all adapters
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            reload(model, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)


def _plain(optimizer: Any) -> torch.optim.Optimizer:
    """Return torch's optimiser, which accelerate may have wrapped."""
    found: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return found
