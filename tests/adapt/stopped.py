"""A program of which the second rank is stopped outside of the steps: by Ctrl-C, or a call of `sys.exit`.

torchrun --nproc-per-node 2 stopped.py KIND

KIND: whether the model writes meanwhile, or runs an ordinary pass.
"""

import sys
from typing import Any, NoReturn

import torch
import torch.distributed as dist

import penstock
from tests.support.adapted import DIVISIBLE, Batch, small

STOPS = {"writes": KeyboardInterrupt, "passes": SystemExit}
LAYOUTS: dict[str, dict[str, Any]] = {"writes": {"ep_size": 2}, "passes": {"tp_size": 2, "etp_size": 2}}


def main(kind: str) -> None:
    """Reach the second layer in its second pass, which is no more on the second rank."""
    model = penstock.parallelize(small("qwen3_moe", **DIVISIBLE), plan="flowmoe", **LAYOUTS[kind]).eval()
    tokens_BL = Batch().inputs()["input_ids"]
    with torch.inference_mode():  # exchanges are in threads, which have modes of their own
        model(input_ids=tokens_BL)

    def stop(*_: Any) -> NoReturn:
        raise STOPS[kind]

    if dist.get_rank() == 1:
        model.model.layers[1].self_attn.register_forward_pre_hook(stop)
    if kind == "writes":
        model.generate(tokens_BL, max_new_tokens=3)
    else:
        with torch.no_grad():
            model(input_ids=tokens_BL)


if __name__ == "__main__":
    main(sys.argv[1])
