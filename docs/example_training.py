"""An ordinary PyTorch loop around a scheduled model. Run it alone, or with torchrun on several processes."""

import os

import torch

from penstock import clip_grad_norm_
from penstock.decision import ScheduleConfig
from penstock.models import ModelConfig
from penstock.moe import MoEConfig
from penstock.topology import Layout, ParallelConfig, detect, join, leave
from penstock.topology.join import ALONE
from penstock.train.assemble import build_machinery, build_stack, pick_device
from penstock.train.config import RunConfig

config = RunConfig(
    model=ModelConfig(num_layers=2, hidden_size=64, num_heads=4, seq_len=32),
    moe=MoEConfig(num_experts=4, top_k=2, moe_ffn_hidden_size=128),
    schedule=ScheduleConfig(name="flowmoe", microbatches=2),
)
info = detect(os.environ) or ALONE
device = pick_device(info.local_rank)
join(info, timeout_s=60, device=device)
layout = Layout.build(ParallelConfig(), info.world_size, info.rank, config.moe.num_experts)
stack = build_stack(config, build_machinery(layout, device, config.parallel, "auto"))
optimizer = torch.optim.AdamW(stack.parameters(), lr=1e-2)

generator = torch.Generator().manual_seed(info.rank)
text = torch.randint(256, (4, 33), generator=generator).to(device)  # learn four random samples by heart
for step in range(30):
    loss = stack(text[:, :-1], text[:, 1:])  # the whole batch's loss, the same on every rank
    loss.backward()  # when it returns, every gradient is synchronised
    norm = clip_grad_norm_(stack, max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    if info.rank == 0 and step % 10 == 9:
        print(f"step {step + 1}: loss {loss.item():.3f}, gradient norm {norm.item():.3f}")
stack.close()
leave()
