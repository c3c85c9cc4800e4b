"""How each system is asked for in TRL's script: by one line of it, or by its arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

LINE: Final = "model=model_args.model_name_or_path,"
OURS: Final = "model=penstock.load_pretrained(model_args.model_name_or_path),"
IMPORT: Final = "    import transformers\n"


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A system.

    In `distributed` and `autoep`, "ranks", "nodes" and "devices" (of a node) stand for numbers.

    Attributes:
        scheduled: Whether the script has Penstock's line.
        distributed: Fields of transformers' `DistributedConfig`.
        autoep: Section `expert_parallel` of DeepSpeed's configuration.
    """

    name: str
    scheduled: bool = False
    distributed: Mapping[str, Any] | None = None
    autoep: Mapping[str, Any] | None = None

    def script(self, folder: Path) -> Path:
        """Write TRL's script into the folder, with the one line if it is ours."""
        file = import_module("trl.scripts.sft").__file__
        assert file is not None
        text = Path(file).read_text(encoding="utf-8")
        if self.scheduled:
            assert text.count(LINE) == text.count(IMPORT) == 1, "TRL's script is not as it was"
            text = text.replace(IMPORT, f"    import penstock\n{IMPORT}").replace(LINE, OURS)
        path = folder / "sft.py"
        path.write_text(text, encoding="utf-8")
        return path

    def arguments(self, folder: Path, sizes: Mapping[str, int]) -> list[str]:
        """Return what this system adds to the script's arguments.

        Args:
            folder: Where its files are.
            sizes: How many ranks, nodes and devices of a node there are, by those names.
        """
        if self.distributed is not None:
            given = {"distributed_config": _sized(self.distributed, sizes)}
            return ["--model_init_kwargs", json.dumps(given)]
        if self.autoep is not None:
            path = folder / "deepspeed.json"
            config = {**DEEPSPEED, "expert_parallel": _sized(self.autoep, sizes)}
            path.write_text(json.dumps(config), encoding="utf-8")
            return ["--deepspeed", str(path)]
        return []


BY_TRAINER: Final = "auto"
"""A value of DeepSpeed's configuration that Trainer fills in."""

DEEPSPEED: Final = {
    "train_micro_batch_size_per_gpu": BY_TRAINER,
    "gradient_accumulation_steps": BY_TRAINER,
    "train_batch_size": BY_TRAINER,
    "gradient_clipping": BY_TRAINER,
    "zero_optimization": {"stage": 1},
    "optimizer": {
        "type": "AdamW",  # one that DeepSpeed makes, or it does not know which parameters are experts'
        "params": {
            **dict.fromkeys(("lr", "betas", "eps", "weight_decay"), BY_TRAINER),
            "torch_adam": True,  # DeepSpeed's own would have to be compiled
        },
    },
}
AUTOEP: Final = {"enabled": True, "preset_model": "qwen3_moe", "use_grouped_mm": False}  # faster on CPUs
ALONE: Final = Contender(name="one process")
CONTENDERS: Final = (
    Contender(name="penstock", scheduled=True),
    Contender(name="transformers", distributed={"tp_size": 1, "fsdp_size": "ranks", "ep_size": "ranks"}),
    Contender(name="autoep", autoep={**AUTOEP, "autoep_size": "ranks"}),
    Contender(
        name="transformers, experts in nodes",
        distributed={
            "tp_size": 1,
            "fsdp_size": "devices",
            "ep_size": "devices",
            "dp_replicate_size": "nodes",
        },
    ),
    Contender(name="autoep, experts in nodes", autoep={**AUTOEP, "autoep_size": "devices"}),
)


def _sized(settings: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    return {
        name: sizes.get(value, value) if isinstance(value, str) else value for name, value in settings.items()
    }
