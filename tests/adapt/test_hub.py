"""Models that are named as on the hub: from a hub on this machine, and then from the cache without one."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

import penstock
from penstock.families import model_folder
from tests.support.adapted import small
from tests.support.forked import run_text
from tests.support.hub import hub_of

NAME = "someone/a-model"
PROGRAM = """
import os
import torch
from huggingface_hub import constants
from transformers.models.mixtral import modeling_mixtral

import penstock

torch.set_num_threads(1)
template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, {address!r})
constants.ENDPOINT, constants.HUGGINGFACE_CO_URL_TEMPLATE = {address!r}, template
constants.HF_HUB_CACHE = {cache!r}

def fork(rank, ranks):
    own = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks)
    own |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT={port}, TORCHELASTIC_USE_AGENT_STORE=True)
    child = os.fork()
    if child:
        return child
    os.environ.update({{name: str(value) for name, value in own.items()}} if ranks > 1 else {{}})
    model = penstock.load_pretrained({name!r}, plan="flowmoe")
    held = model.model.layers[0].mlp.experts.down_proj.shape[0]
    print("has", held, float(model.lm_head.weight.sum().detach()), flush=True)
    os._exit(0)

for offline, ranks in ((False, 2), (True, 1)):
    constants.HF_HUB_OFFLINE = offline
    children = [fork(rank, ranks) for rank in range(ranks)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * ranks
"""
"""Two ranks that load a model, and then a process that has the cache alone."""


@pytest.mark.slow
def test_a_model_is_read_by_its_name_on_the_hub(tmp_path: Path) -> None:
    """By every rank its experts; files of folders inside are left there. Afterwards no hub is needed."""
    whole, folder, cache = small("mixtral"), tmp_path / "model", tmp_path / "cache"
    whole.save_pretrained(folder)
    (folder / "original").mkdir()
    (folder / "original/model.safetensors").write_text("not to be read")
    head = str(float(whole.lm_head.weight.sum().detach()))
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    with hub_of(folder, NAME) as address:
        done = run_text(PROGRAM.format(address=address, cache=str(cache), port=store.port, name=NAME))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [*["has", "4", head] * 2, "has", "8", head]
    assert not list(cache.rglob("original"))


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
