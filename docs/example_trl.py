"""Fine-tunes a model by TRL: torchrun --nproc-per-node 4 docs/example_trl.py FOLDER [PLAN]"""

import os
import sys
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig
from trl import SFTConfig, SFTTrainer

import penstock

folder, plan = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "auto"

# A model and a tokenizer of one token per byte; otherwise from_pretrained(path).
alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
bytes_of = Tokenizer(models.BPE({letter: number for number, letter in enumerate(["<pad>", *alphabet])}, []))
bytes_of.pre_tokenizer, bytes_of.decoder = (
    pre_tokenizers.ByteLevel(add_prefix_space=False),
    decoders.ByteLevel(),
)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_of, pad_token="<pad>", eos_token="<pad>")
torch.manual_seed(0)  # every rank begins with the same model
model = AutoModelForCausalLM.from_config(
    Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        moe_intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=0,
    )
)

sentences = ["The network is slow", "so it works", "while something else is computed"]
data = Dataset.from_dict({"text": [f"{one}, {other}." for one in sentences for other in sentences] * 40})

gpu = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))  # what the trainer takes
model.to(gpu if torch.cuda.is_available() else "cpu")
model = penstock.parallelize(model, plan=plan)  # the one line: experts are spread over all ranks

trainer = SFTTrainer(
    model=model,
    args=SFTConfig(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        max_steps=20,
        learning_rate=3e-3,
        logging_steps=5,
        save_steps=10,
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    ),
    train_dataset=data,
    processing_class=tokenizer,
)
trainer.train()
trainer.save_model(str(folder / "last"))  # of transformers, whole

if trainer.is_world_process_zero():
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    reloaded = AutoModelForCausalLM.from_pretrained(folder / "last")  # on one process, without Penstock
    prompt = tokenizer("The network", return_tensors="pt").input_ids
    written = reloaded.generate(prompt, max_new_tokens=8, do_sample=False)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}: {tokenizer.decode(written[0])}")
torch.distributed.destroy_process_group()
