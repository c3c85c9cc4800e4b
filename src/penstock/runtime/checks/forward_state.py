"""What a backward pass must find as its forward pass left it: values, and what decides what is recomputed.

What only decides how modules compute is put back while backward runs, so that gradients are those of the
forward pass. Values cannot be put back, so a change of them is refused before anything is sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

import torch
from torch import Tensor, nn

from penstock.device import device_of
from penstock.runtime.fingerprints import Snapshot

SAMPLED: Final = 16
"""About as many elements of every parameter are compared."""
Kind = tuple[torch.device, torch.dtype]


class ForwardState:
    """The state of a model in one forward pass: made before it, told its end by `note`.

    A parameter's version says whether it was written to, but not by `parameter.data`. So a few of its
    elements are compared, too: that finds whatever changes most of them, such as weights that are swapped.
    recomputes: whether tasks run a second time in the backward pass. They then also need the same modules,
    in the same mode, and the same buffers. rewinds: whether the forward pass itself may be run a second time
    at its end, after `rewind`.
    """

    def __init__(self, snapshot: Snapshot, *, recomputes: bool, rewinds: bool = False) -> None:
        self._snapshot, self._recomputes = snapshot, recomputes
        buffers = snapshot.buffers() if recomputes or rewinds else []
        self._buffers = [(b, 0 if b.is_inference() else b._version) for b in buffers]
        self._before = [buffer.clone() for buffer in buffers] if rewinds else []

    @torch.no_grad()
    def rewind(self) -> None:
        """Put buffers to which the pass has added, as running averages do, back to what they were before."""
        for (buffer, version), before in zip(self._buffers, self._before, strict=False):
            if not buffer.is_inference() and buffer._version != version:
                buffer.copy_(before)
        self._before = []

    def note(self) -> None:
        """Note the state at the end of the forward pass."""
        parameters = self._snapshot.parameters
        self._trained = [p.requires_grad for p in parameters]
        self._versions = [p._version for p in parameters]
        self._samples = Samples(parameters)
        self._counting = [buffer for buffer, version in self._buffers if buffer._version != version]
        if self._recomputes:
            self._places = [p.data_ptr() for p in parameters]
            self._modes = [module.training for module in self._snapshot.modules]
            self._dtype = torch.get_default_dtype()

    def check(self) -> None:
        """Raise RuntimeError if values of parameters, or modules that run again, are not what they were.

        On a GPU a change through `parameter.data` raises when the device gets there, and names no parameter.
        """
        if self._recomputes and not self._snapshot.has_same_modules():
            raise RuntimeError(_refusal("modules or parameters of the model were replaced"))
        for place, parameter in enumerate(self._snapshot.parameters):
            written = parameter._version != self._versions[place]
            if written or (self._recomputes and parameter.data_ptr() != self._places[place]):
                raise RuntimeError(_refusal(f"{self._snapshot.name_of(parameter)} was changed"))
        if (changed := self._samples.changed()) is not None:
            raise RuntimeError(_refusal(f"{self._snapshot.name_of(changed)} was changed"))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Let the model be as in the forward pass, while its backward runs.

        A parameter that was frozen then gets no gradient. Buffers to which the forward pass has added, as
        running averages do, are not added to a second time.
        """
        with ExitStack() as after:
            for parameter, trained in zip(self._snapshot.parameters, self._trained, strict=True):
                if parameter.requires_grad and not trained:
                    parameter.requires_grad_(False)
                    after.callback(parameter.requires_grad_)
            if self._recomputes:
                for module, training in zip(self._snapshot.modules, self._modes, strict=True):
                    if module.training != training:
                        after.callback(setattr, module, "training", module.training)
                        module.training = training
                if torch.get_default_dtype() != self._dtype:
                    after.callback(torch.set_default_dtype, torch.get_default_dtype())
                    torch.set_default_dtype(self._dtype)
                for buffer in self._counting:
                    after.callback(_put_back, buffer, buffer.clone())
            yield


class Samples:
    """A few elements of every parameter, as they are now."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._views: dict[Kind, list[tuple[nn.Parameter, Tensor]]] = {}
        with torch.no_grad():
            for parameter in parameters:
                if type(parameter) is nn.Parameter and parameter.numel():
                    of_kind = self._views.setdefault((parameter.device, parameter.dtype), [])
                    of_kind.append((parameter, _some_of(parameter)))
        self._values = self._read()

    def changed(self) -> nn.Parameter | None:
        """Return a parameter whose elements are others now; None if there is none, or it is on a GPU."""
        for (kind, before), now in zip(self._values.items(), self._read().values(), strict=True):
            if device_of(kind[0]).is_gpu:  # reading the answer would make the host wait
                torch._assert_async((before == now).all(), _refusal("a parameter was changed"))
            elif not torch.equal(before, now):
                sizes = [view.numel() * view.itemsize for _, view in self._views[kind]]
                pairs = zip(self._views[kind], before.split(sizes), now.split(sizes), strict=True)
                return next(p for (p, _), was, found in pairs if not torch.equal(was, found))
        return None

    def _read(self) -> dict[Kind, Tensor]:
        """Return the elements as bytes, so that a NaN is equal to itself."""
        rows = {kind: [v if v.dim() == 1 else v.flatten() for _, v in of] for kind, of in self._views.items()}
        return {kind: torch.cat(views).view(torch.uint8) for kind, views in rows.items()}


def _some_of(values: Tensor) -> Tensor:
    """Return a view of about `SAMPLED` elements; of a tensor whose memory has gaps, of more."""
    if values.is_contiguous():
        step = values.numel() // SAMPLED | 1  # odd, so that not all are of one column
        return values.as_strided((-(-values.numel() // step),), (step,))
    return values[tuple(slice(None, None, max(1, size // 4)) for size in values.shape)]


@torch.no_grad()
def _put_back(buffer: Tensor, values: Tensor) -> None:
    buffer.copy_(values)


def _refusal(what: str) -> str:
    return (
        f"{what} between forward and backward, so gradients would be those of neither: change a model before "
        "the forward pass or after backward, or compute the loss again"
    )
