"""What TRL's script reads: a small Qwen3-MoE with a tokenizer of bytes, and texts, all made here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

SAMPLES = 256


@dataclass(frozen=True, kw_only=True)
class Size:
    """Of the model, and of what each rank gets: `samples` of `length` tokens per step."""

    layers: int = 4
    hidden: int = 256
    experts: int = 64
    top_k: int = 8
    expert_width: int = 192
    samples: int = 2
    length: int = 256

    @property
    def rows_bytes(self) -> int:
        """Of the rows that one rank sends and receives in one transfer of one layer, in float32."""
        return 4 * self.samples * self.length * self.top_k * self.hidden


def prepare(folder: Path, size: Size) -> int:
    """Write `model` and `data` into the folder; return the number of parameters."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig

    letters = ["<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    of_bytes = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    of_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    of_bytes.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=of_bytes, pad_token="<pad>", eos_token="<pad>")
    torch.manual_seed(0)
    heads = max(2, size.hidden // 32)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden,
        moe_intermediate_size=size.expert_width,
        num_hidden_layers=size.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=size.hidden // heads,
        num_experts=size.experts,
        num_experts_per_tok=size.top_k,
        norm_topk_prob=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    _write_texts(folder / "data", size.length)
    return sum(parameter.numel() for parameter in model.parameters())


def _write_texts(folder: Path, length: int) -> None:
    """Write parts of this project's pages, of 0.6 to 1.4 times as many bytes as a sample has tokens."""
    pages = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    folder.mkdir()
    place, lines = 0, []
    for number in range(SAMPLES):
        end = place + int(length * (0.6 + 0.8 * (number * 7 % 16) / 16))
        lines.append(json.dumps({"text": text[place:end]}))
        place = end % (len(text) - 2 * length)
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
