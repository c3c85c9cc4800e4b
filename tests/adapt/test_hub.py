"""Models that are named as on the hub: from a hub on this machine, and then from the cache without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from penstock.families import model_folder
from tests.support.adapted import small
from tests.support.hub import hub_of
from tests.support.patience import HANG_S

NAME = "someone/a-model"
PROGRAM = f"""
import penstock
model = penstock.load_pretrained({NAME!r}, plan="flowmoe")
print("has", model.model.layers[0].mlp.experts.down_proj.shape[0], float(model.lm_head.weight.sum().detach()))
"""


def printed(home: Path, ranks: int, **environ: str) -> list[str]:
    """The words that ranks print which read the model by its name."""
    (home / "program.py").write_text(PROGRAM, encoding="utf-8")
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, *(launcher if ranks > 1 else ()), str(home / "program.py")]
    given = {**os.environ, "HF_HOME": str(home), "OMP_NUM_THREADS": "1", **environ}
    done = subprocess.run(command, env=given, stdout=subprocess.PIPE, text=True, timeout=HANG_S, check=True)
    return done.stdout.split()


@pytest.mark.slow
def test_a_model_is_read_by_its_name_on_the_hub(tmp_path: Path) -> None:
    """By every rank its experts; files of folders inside are left there. Afterwards no hub is needed."""
    whole, folder, home = small("mixtral"), tmp_path / "model", tmp_path / "home"
    whole.save_pretrained(folder)
    (folder / "original").mkdir()
    (folder / "original/model.safetensors").write_text("not to be read")
    home.mkdir()
    head = str(float(whole.lm_head.weight.sum().detach()))
    with hub_of(folder, NAME) as address:
        found = printed(home, 2, HF_ENDPOINT=address, HF_HUB_OFFLINE="0")
    assert found == ["has", "4", head] * 2
    assert not list(home.rglob("original"))
    assert printed(home, 1, HF_HUB_OFFLINE="1") == ["has", "8", head]


def test_a_name_that_the_hub_does_not_have() -> None:
    with pytest.raises(
        ValueError, match="some/one is no folder here, and the Hugging Face hub does not give"
    ):
        penstock.load_pretrained("some/one")


def test_a_folder_goes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir(parents=True)
    with pytest.raises(ValueError, match=rf"{NAME} holds no config\.json"):
        penstock.load_pretrained(NAME)
    for named in (tmp_path / "nothing", "./nothing", "a/b/c", Path("some/one")):
        assert model_folder.folder_of(named) == Path(named)
