"""Fine-tunes a model: torchrun --nproc-per-node 4 docs/example_hugging_face.py FOLDER [PLAN]"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import penstock

folder, plan = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "auto"
config = Qwen3MoeConfig(
    vocab_size=256,
    hidden_size=64,
    moe_intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=8,
    num_experts_per_tok=2,
    bos_token_id=None,
    eos_token_id=None,
)
# A GPU for every rank of this machine, or none: the model is trained where its parameters are.
place = int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)  # of torchrun, or srun
gpus = torch.cuda.device_count()  # 1 where Slurm shows each rank its own
device = f"cuda:{place % gpus}" if gpus >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")) else "cpu"
torch.manual_seed(0)  # every rank begins with the same model
model = AutoModelForCausalLM.from_config(config).to(device)  # or from_pretrained(path)
model = penstock.parallelize(model, plan=plan)  # experts are spread over all ranks
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

text = "The network is slow, so it works while something else is computed. "
tokens = torch.tensor([list(text.encode())], device=device)
rank = dist.get_rank()
for step in range(40):
    first = (7 * step + 17 * rank) % 16  # every rank reads another part of the text
    batch = torch.cat([tokens[:, first + shift : first + shift + 32] for shift in (0, 4, 8, 12)])
    loss = model(input_ids=batch, labels=batch).loss  # of the batch of all ranks
    loss.backward()  # every gradient is synchronised
    norm = penstock.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and step % 10 == 9:
        print(f"step {step + 1}: loss {loss.item():.3f}, gradient norm {norm.item():.3f}")

model.save_pretrained(folder)  # safetensors, written by all ranks together
model.eval()
prompt = tokens[:, :14]
ours = model.generate(prompt, max_new_tokens=24, do_sample=False)  # all ranks together, each its own prompt

if rank == 0:
    reloaded = AutoModelForCausalLM.from_pretrained(folder).to(device).eval()  # without Penstock
    theirs = reloaded.generate(prompt, max_new_tokens=24, do_sample=False)
    print(f"trained:  {bytes(ours[0].tolist()).decode(errors='replace')}")
    print(f"reloaded: {bytes(theirs[0].tolist()).decode(errors='replace')}")
    print("the same" if ours.equal(theirs) else "not the same")
dist.destroy_process_group()
