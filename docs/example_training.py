"""An ordinary PyTorch loop around a scheduled model. Run it alone, or with torchrun on several processes."""

import torch

import penstock

config = penstock.RunConfig(
    model=penstock.ModelConfig(num_layers=2, hidden_size=64, num_heads=4, seq_len=32),
    moe=penstock.MoEConfig(num_experts=8, top_k=2, moe_ffn_hidden_size=128),
    schedule=penstock.ScheduleConfig(name="flowmoe", microbatches=2),
)
with penstock.session(config) as run:  # joins the other processes, builds the model
    optimizer = torch.optim.AdamW(run.model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(run.rank)
    text = torch.randint(256, (4, 33), generator=generator).to(run.device)  # four samples to memorise
    for step in range(30):
        loss = run.model(text[:, :-1], text[:, 1:])  # the whole batch's loss, the same on every rank
        loss.backward()  # when it returns, every gradient is synchronised
        norm = penstock.clip_grad_norm_(run.model, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        if run.rank == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.3f}, gradient norm {norm.item():.3f}")
