"""Fine-tunes a model of transformers in a loop of its own, as docs/hugging-face.md shows.

torchrun --nproc-per-node 2 fine_tune.py FOLDER OUT FIRST_STEP LAST_STEP

FOLDER has the model, or where the first step is not 0 a checkpoint that an earlier start has left. Every
third step leaves one, `OUT/step-3` and so on. At the end every rank leaves samples and its logits for them,
and the first one prints all losses.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

import penstock

SAMPLES, LENGTH, VOCABULARY = 8, 12, 61
SAVED_EVERY = 3
RATE, MAX_NORM = 1e-2, 1.0


def batch_of(step: int) -> Tensor:
    """Return the samples of a step, of all ranks together."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(3, VOCABULARY, (SAMPLES, LENGTH), generator=generator)


def fine_tune(folder: Path, out: Path, steps: range) -> None:
    """Train for some steps, on this rank's samples of each."""
    if steps.start == 0:
        whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        model = penstock.parallelize(whole, plan="flowmoe")
    else:
        model = penstock.load_pretrained(folder, plan="flowmoe", dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    if steps.start > 0:
        penstock.load_optimizer(model, optimizer, folder)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    losses = {}
    for step in steps:
        tokens_BL = batch_of(step)[rank::ranks]
        loss = model(input_ids=tokens_BL, labels=tokens_BL).loss
        loss.backward()
        penstock.clip_grad_norm_(model, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.item()
        if (step + 1) % SAVED_EVERY == 0:
            penstock.save_checkpoint(model, optimizer, out / f"step-{step + 1}")
    tokens_BL = batch_of(steps.stop)[rank::ranks]
    model.eval()
    with torch.no_grad():
        logits_BLV = model(input_ids=tokens_BL).logits
    torch.save({"tokens": tokens_BL, "logits": logits_BLV}, out / f"rank{rank}.pt")
    if rank == 0:
        print(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    fine_tune(Path(sys.argv[1]), Path(sys.argv[2]), range(int(sys.argv[3]), int(sys.argv[4])))
