"""A program of which the second rank is stopped outside of the steps: by Ctrl-C, or a call of `sys.exit`.

torchrun --nproc-per-node 2 stopped.py KIND

KIND: whether the model writes meanwhile, or runs an ordinary pass.
"""

import sys
from typing import Any, NoReturn

import torch.distributed as dist

import penstock
from tests.support.adapted import Batch, small

STOPS = {"writes": KeyboardInterrupt, "passes": SystemExit}


def main(kind: str) -> None:
    """Reach the second layer in its second pass, which is no more on the second rank."""
    model = penstock.parallelize(small("mixtral"), ep_size=2, plan="flowmoe").eval()
    tokens_BL = Batch().inputs()["input_ids"]
    model(input_ids=tokens_BL)

    def stop(*_: Any) -> NoReturn:
        raise STOPS[kind]

    if dist.get_rank() == 1:
        model.model.layers[1].self_attn.register_forward_pre_hook(stop)
    if kind == "writes":
        model.generate(tokens_BL, max_new_tokens=3)
    else:
        model(input_ids=tokens_BL)


if __name__ == "__main__":
    main(sys.argv[1])
