"""What docs/integrations.md shows runs on two ranks as a plain loop does on one, to the last digits."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import penstock
from penstock.models.huggingface import layer_from_hugging_face
from tests.support.adapted import as_torchrun_starts_it
from tests.support.pages import ROOT, blocks, run_block
from tests.support.ranks import Pools

PAGE = ROOT / "docs" / "integrations.md"
RANKS, SAMPLES, LENGTH = 2, 2, 5
LIMIT, RATE = 1.0, 0.1
EXACT, ROUNDED = 1e-10, 0.02
Batch = tuple[Tensor, Tensor]
Tensors = dict[str, Tensor]


def numbers(*shape: int, name: str, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def batches_of(rank: int, dtype: torch.dtype) -> list[Batch]:
    """Two, with more samples in the second: experts get other numbers of rows."""
    found = []
    for number in range(2):
        size = (SAMPLES + number, LENGTH)
        x, labels = (f"{what} {rank} {number}" for what in ("x", "labels"))
        found.append((numbers(*size, 16, name=x, dtype=dtype), numbers(*size, 4, name=labels, dtype=dtype)))
    return found


def logical(model: Any, tensors: Mapping[str, Tensor]) -> Tensors:
    """By names in the whole model, experts one by one, shards put together."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        parts = [(name, whole)] if ".experts." not in name else model.layer.by_number(name, whole)
        found.update((part, value.detach().clone()) for part, value in parts)
    return found


def drawn(model: Any, dtype: torch.dtype) -> Any:
    model.to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parts = [(name, parameter)] if ".experts." not in name else model.layer.by_number(name, parameter)
            for part, view in parts:
                view.copy_(0.5 * numbers(*view.shape, name=part))
    return model


@dataclass
class Ran:
    """Losses of all passes, gradients of all steps after clipping, norms before; parameters at the end."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: list[Tensors] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: Tensors = field(default_factory=dict)

    def note_loss(self, _model: nn.Module, _inputs: Any, out: dict[str, Tensor]) -> None:
        self.losses.append(out["loss"].detach())

    def note_step(self, model: Any, norm: Tensor) -> None:
        self.norms.append(float(norm))
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        self.gradients.append(logical(model, gradients))


@cache
def exchange() -> penstock.ExpertParallel:
    """Kept, since a pool runs many examples."""
    return penstock.ExpertParallel(num_experts=8)


# The plain loop


def plain(
    passes: int = 1,
    dtype: torch.dtype = torch.float64,
    whole: bool = False,
    narrow: torch.dtype = torch.bfloat16,
) -> Ran:
    """One process with all experts and the tokens of all ranks. whole: the same batch in every step.
    narrow: what autocast computes in if parameters are float32."""
    ran, (common,) = Ran(), blocks(PAGE, "The model")
    model = drawn(run_block(common)["Model"](), dtype)
    model.register_forward_hook(ran.note_loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    made = [batches_of(rank, dtype) for rank in range(RANKS)]
    joined = [tuple(map(torch.cat, zip(*each, strict=True))) for each in zip(*made, strict=True)]
    for number, (x, labels) in enumerate(joined[:1] * 2 if whole else joined):
        with torch.autocast("cpu", narrow, enabled=dtype == torch.float32):
            loss = model(x, labels)["loss"] / passes
        loss.backward()
        if number % passes == passes - 1:
            ran.note_step(model, torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT))
            optimizer.step()
            optimizer.zero_grad()
    ran.parameters = logical(model, dict(model.named_parameters()))
    return ran


# On the ranks


@contextmanager
def noting(ran: Ran, made: list[Any]) -> Iterator[None]:
    """What `penstock.clip_grad_norm_` has clipped is kept."""
    clip = penstock.clip_grad_norm_

    def noted(model: Any, max_norm: float) -> Tensor:
        norm = clip(model, max_norm)
        ran.note_step(made[0], norm)
        return norm

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(penstock, "clip_grad_norm_", noted)
        yield


def example(heading: str) -> str:
    """The code of a section, with the loop that it shares with another."""
    (code,), (shared,) = blocks(PAGE, heading), blocks(PAGE, "DistributedDataParallel")
    _, mark, loop = shared.partition("optimizer = ")
    return code.replace("# the loop of DistributedDataParallel\n", mark + loop)


def run_page(
    rank: int, heading: str, dtype: torch.dtype = torch.float64, change: Callable[[str], str] = str
) -> Ran:
    """One example of the page. change: of its code, to make a mistake in it."""
    ran, made = Ran(), list[Any]()
    (common,) = blocks(PAGE, "The model")
    known = run_block(common)

    def make_model() -> Any:
        model = drawn(known["Model"](exchange()), dtype)
        model.register_forward_hook(ran.note_loss)
        made.append(model)
        return model

    firsts = [batches_of(each, dtype)[0] for each in range(RANKS)]
    samples = [{"x": x, "labels": y} for each in firsts for x, y in zip(*each, strict=True)]
    given = {"make_model": make_model, "batches": batches_of(rank, dtype), "samples": samples}
    with noting(ran, made):
        run_block(change(example(heading)), **{**known, **given})
    ran.parameters = logical(made[0], dict(made[0].named_parameters()))
    return ran


def check(results: list[Ran], wanted: Ran, tolerance: float = EXACT) -> None:
    losses = torch.stack([torch.stack(ran.losses) for ran in results]).mean(0)
    torch.testing.assert_close(losses, torch.stack(wanted.losses), rtol=tolerance, atol=0)
    assert min(wanted.norms) > 1.5 * LIMIT, "nothing was clipped"
    for ran in results:
        assert ran.norms == results[0].norms == pytest.approx(wanted.norms, rel=tolerance)
    steps = zip(*(ran.gradients for ran in results), strict=True)
    for found, expected in zip(steps, wanted.gradients, strict=True):
        check_tensors(found, expected, tolerance)
    check_tensors(tuple(ran.parameters for ran in results), wanted.parameters, tolerance)


def check_tensors(found: tuple[Tensors, ...], wanted: Tensors, tolerance: float) -> None:
    """What several ranks hold is equal to the bit."""
    together: Tensors = {}
    for tensors in found:
        for name, tensor in tensors.items():
            assert torch.equal(together.setdefault(name, tensor), tensor), f"{name} differs by rank"
    assert together.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert float((together[name] - tensor).norm()) <= tolerance * float(tensor.norm()), name


@pytest.mark.parametrize("heading", ["DistributedDataParallel", "FSDP2", "Checkpointing"])
def test_an_example_trains_as_a_plain_loop(ranks: Pools, heading: str) -> None:
    check(ranks(RANKS).run(run_page, heading), plain())


def test_accumulated_gradients(ranks: Pools) -> None:
    check(ranks(RANKS).run(run_page, "Accumulated gradients"), plain(passes=2))


def with_fsdp(code: str) -> str:
    """As the sentence under the example says."""
    code = code.replace("with nullcontext() if last else model.no_sync():", "if True:")
    code = code.replace(
        "    last = number", "    model.set_requires_gradient_sync(number % 2 == 1)\n    last = number"
    )
    setup = example("FSDP2").partition("optimizer = ")[0]
    return setup + code.partition("\n\n")[2].partition("\n\n")[2].partition("\n")[2]


def test_accumulated_gradients_with_fsdp(ranks: Pools) -> None:
    check(ranks(RANKS).run(run_fsdp_accumulating), plain(passes=2))


def run_fsdp_accumulating(rank: int) -> Ran:
    return run_page(rank, "Accumulated gradients", change=with_fsdp)


def test_autocast(ranks: Pools) -> None:
    check(ranks(RANKS).run(run_autocast), plain(dtype=torch.float32), ROUNDED)


def run_autocast(rank: int) -> Ran:
    return run_page(rank, "Autocast and scaled losses", torch.float32, change=without_scaler)


def without_scaler(code: str) -> str:
    """As the sentence under the example says."""
    code = code.replace("float16", "bfloat16").replace("scaler.scale(loss)", "loss")
    code = code.replace("scaler.step(optimizer)", "optimizer.step()")
    return "".join(line for line in code.splitlines(keepends=True) if "scaler" not in line.lower())


def scaled_less(code: str) -> str:
    """These losses are large, and a scaler begins with leaving out steps until its scale fits."""
    return code.replace('Scaler("cpu")', 'Scaler("cpu", init_scale=2.0**-6)')


def test_scaled_losses(ranks: Pools) -> None:
    wanted = plain(dtype=torch.float32, narrow=torch.float16)
    check(
        ranks(RANKS).run(run_page, "Autocast and scaled losses", torch.float32, scaled_less), wanted, ROUNDED
    )


def run_compiled(rank: int, backend: str) -> tuple[Ran, list[str]]:
    """backend: inductor needs a compiler of C++ and a minute. Also what the graphs call."""
    from torch._dynamo.backends.registry import lookup_backend

    called: list[str] = []
    inner = lookup_backend(backend)

    def listing(graph: Any, inputs: Any) -> Any:
        called.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return inner(graph, inputs)

    torch.compiler.reset()
    before = torch.compiler.get_default_backend()
    torch.compiler.set_default_backend(listing)
    try:
        return run_page(rank, "torch.compile"), called
    finally:
        torch.compiler.set_default_backend(before)
        torch.compiler.reset()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.soak)])
def test_compiled(ranks: Pools, backend: str) -> None:
    results = ranks(RANKS).run(run_compiled, backend)
    check([ran for ran, _ in results], plain())
    for _, called in results:
        assert called.count("penstock.grouped_product.default") == 3, (
            "once for each matrix, for any row count"
        )
        assert any("linear" in name for name in called), "the rest of the model is compiled, too"


def run_framework(rank: int, heading: str) -> Ran:
    with as_torchrun_starts_it(rank, RANKS):
        return run_page(rank, heading)


def test_accelerate(ranks: Pools) -> None:
    check(ranks(RANKS).run(run_framework, "Accelerate"), plain())


def test_trainer(ranks: Pools, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step has all samples, in whatever order."""
    del tmp_path, monkeypatch
    check(ranks(RANKS).run(run_framework, "Trainer"), plain(whole=True))


def test_lightning(ranks: Pools) -> None:
    check(ranks(RANKS).run(run_framework, "Lightning"), plain())


# Blocks of transformers


def hugging_face_block() -> nn.Module:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(hidden_size=32, intermediate_size=24, num_local_experts=8, num_experts_per_tok=2)
    block: nn.Module = MixtralSparseMoeBlock(config).double()
    for name, parameter in block.named_parameters():
        nn.init.zeros_(parameter).data.add_(0.3 * numbers(*parameter.shape, name=name))
    return block


def run_taken_over(rank: int) -> tuple[Tensor, Tensors, int]:
    layer = layer_from_hugging_face(hugging_face_block(), exchange=exchange())
    model = DistributedDataParallel(penstock.ignore_experts(layer))
    out = model(numbers(2, LENGTH, 32, name=f"x {rank}"))
    out.square().mean().backward()
    gradients = {f"layer.{name}": p.grad for name, p in layer.named_parameters() if p.grad is not None}
    holder = nn.Module()
    holder.layer = layer
    return out.detach(), logical(holder, gradients), layer.experts.num_local_experts


def test_a_block_of_transformers_is_spread(ranks: Pools) -> None:
    layer = layer_from_hugging_face(hugging_face_block())
    outs = [layer(numbers(2, LENGTH, 32, name=f"x {rank}")) for rank in range(RANKS)]
    torch.stack([out.square().mean() for out in outs]).mean().backward()
    holder = nn.Module()
    holder.layer = layer
    gradients = {f"layer.{name}": p.grad for name, p in layer.named_parameters() if p.grad is not None}
    results = ranks(RANKS).run(run_taken_over)
    for (out, _, held), wanted in zip(results, outs, strict=True):
        torch.testing.assert_close(out, wanted.detach(), rtol=EXACT, atol=1e-12)
        assert held == 8 // RANKS
    check_tensors(tuple(found for _, found, _ in results), logical(holder, gradients), EXACT)
