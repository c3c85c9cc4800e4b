"""A model of transformers in the pieces that the engine schedules, cut where its layers call their experts.

Where ranks share attention, a layer's own code runs twice: its attention on the tokens of all ranks, for this
rank's heads, and then the layer on this rank's tokens, with what the ranks' heads have added up to in place
of its attention.
Shapes: B samples, L tokens per sample (of all ranks, or this rank's), M hidden size, V vocabulary,
T = B * L tokens.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from penstock.adapt.cut import Caught, Cut, Inside, RouterUse
from penstock.adapt.tensor import SharedLayer, Skipped, TensorShares
from penstock.device import device_of
from penstock.families.inspection import code_of, in_parts
from penstock.families.known import Family
from penstock.families.sections import coefficient_of
from penstock.moe import MoELayer, SampleKeys
from penstock.runtime.batch import check_vocabulary
from penstock.runtime.statistics import cross_entropy_sum
from penstock.sharding import shardings_of

HOOKED = "_output_capturing_hooks_installed"
"""Whether a decoder of transformers has the hooks by which it returns what inner modules have computed."""


@dataclass(frozen=True)
class Inputs:
    """Inputs of a step besides tokens and labels.

    Attributes:
        mask_BL: The attention mask, as it was given.
        positions_BL: Positions of tokens, [1, L] where all samples have the same, or several such tables,
            [_, B, L].
        routers: What the step does with routers, see `RouterUse`.
        packed: Arguments that tell documents apart in the only sample.
    """

    mask_BL: Tensor | None = None
    positions_BL: Tensor | None = None
    routers: RouterUse = "unused"
    packed: Mapping[str, Any] = field(default_factory=dict)

    def of(self, keys: SampleKeys) -> dict[str, Any]:
        """Return the inputs of the samples of a microbatch, as the model takes them."""
        inputs: dict[str, Any] = dict(self.packed)
        # Samples stay where masks are given, so theirs are a view of the batch's numbers; to read one of
        # these the host would wait for a GPU.
        rows = slice(start := int(keys.sample_ids_B.storage_offset()), start + len(keys.sample_ids_B))
        if (mask_BL := self.mask_BL) is not None:
            inputs["attention_mask"] = mask_BL if len(mask_BL) == 1 else mask_BL[rows]
        if (positions_BL := self.positions_BL) is not None:
            same = positions_BL.shape[-2] == 1
            inputs["position_ids"] = positions_BL if same else positions_BL[..., rows, :]
        return inputs


@dataclass(frozen=True)
class LayerCall:
    """Arguments with which the decoder calls a layer besides hidden states: masks, positions and the like.

    Attributes:
        arguments: By place.
        named: By name.
    """

    arguments: tuple[Any, ...]
    named: dict[str, Any]


class _Recorder(nn.Module):
    """Replaces a layer while the decoder runs up to its layers, and records how it is called."""

    def __init__(self, layer: nn.Module, calls: list[LayerCall], entered: list[Tensor]) -> None:
        super().__init__()
        self.__dict__.update(stands_for=layer, calls=calls, entered=entered)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["stands_for"], name)

    def forward(self, hidden_states: Tensor, *arguments: Any, **named: Any) -> Tensor:
        self.__dict__["calls"].append(LayerCall(arguments, named))
        self.__dict__["entered"].append(hidden_states)
        return hidden_states


@dataclass(frozen=True)
class Called:
    """Arguments of every layer for one microbatch.

    Attributes:
        layers: By number of the layer.
        attended_T: Whether the attention mask shows a token; None = it shows all.
        routers: As `Inputs` has it.
    """

    layers: list[LayerCall]
    attended_T: Tensor | None
    routers: RouterUse


class Calls:
    """Arguments of the layers for the microbatches of every step whose backward may still come.

    The arguments of a step are freed when its backward has run, or its loss is gone. They are found by the
    tensor of a microbatch's samples: to read its numbers the host would wait for a GPU, in every layer.

    Attributes:
        inside: Whether a step runs a layer now.
        routers: As `Inputs` of the step has it.
        make: Returns the arguments for samples that have come together only now; None where they cannot be
            made again, as masks and positions were given.
    """

    def __init__(self, inside: Inside | None = None) -> None:
        self._by_samples: Any = WeakIdKeyDictionary()  # of weak references to `Called`
        self._step: list[Called] = []
        self.inside = inside or Inside()
        self.routers: RouterUse = "unused"
        self.make: Callable[[SampleKeys], list[LayerCall]] | None = None

    def begin(self) -> None:
        """Begin a step."""
        self._step = []

    def end_with(self, loss: Tensor) -> None:
        """End the forward pass of the step that has this loss."""
        step, self._step = self._step, []
        if loss.grad_fn is not None:
            loss.grad_fn.register_hook(lambda *_: step.clear())

    def put(self, keys: SampleKeys, layers: list[LayerCall], given: Inputs) -> None:
        """Store the arguments of the layers for the microbatch with these samples."""
        mask_BL = given.of(keys).get("attention_mask")
        attended_T = None if mask_BL is None or mask_BL.dim() != 2 else mask_BL.bool().flatten()
        self._keep(keys, Called(layers, attended_T, given.routers))

    def of(self, keys: SampleKeys) -> Called:
        """Return the arguments of the layers for the microbatch with these samples."""
        reference = self._by_samples.get(keys.sample_ids_B)
        cached: Called | None = None if reference is None else reference()
        if cached is not None:
            return cached
        for samples_B, reference in list(self._by_samples.items()):  # another view may be of the same samples
            called: Called | None = reference()
            if called is not None and _are_same(samples_B, keys.sample_ids_B):
                self._by_samples[keys.sample_ids_B] = reference
                return called
        assert self.make is not None, "samples stay where masks and positions are given"
        made = Called(self.make(keys), None, self.routers)
        self._keep(keys, made)
        return made

    def _keep(self, keys: SampleKeys, called: Called) -> None:
        self._step.append(called)
        self._by_samples[keys.sample_ids_B] = weakref.ref(called)


def _are_same(samples_B: Tensor, others_B: Tensor) -> bool:
    """Tell whether numbers of samples lie in one place, or are the same where no wait tells."""
    if len(samples_B) != len(others_B):
        return False
    return samples_B.data_ptr() == others_B.data_ptr() or (
        not device_of(samples_B).is_gpu and samples_B.equal(others_B)
    )


class _Layer:
    """A layer, and what ranks share of it, if they share attention."""

    moe: MoELayer | None = None
    row_norm = None

    def __init__(
        self, layer: Any, index: int, calls: Calls, family: Family, shared: SharedLayer | None = None
    ) -> None:
        self.layer, self.index, self._calls, self._family = layer, index, calls, family
        self._shared_if_any = shared

    @property
    def _shared(self) -> SharedLayer:
        assert self._shared_if_any is not None, "ranks share attention"
        return self._shared_if_any

    def mix(self, h_BLM: Tensor, keys: SampleKeys) -> Tensor:
        """Return what this rank's heads add to the residual stream of all tokens."""
        if not h_BLM.numel():
            return h_BLM
        call, norm = self._calls.of(keys).layers[self.index], self._shared.norm
        assert not call.arguments, "families whose attention is cut name what they give a layer"
        with self._calls.inside.step():
            normed_BLM = h_BLM if norm is None else norm(h_BLM)
            attended: Tensor = self._shared.attention.module(hidden_states=normed_BLM, **call.named)[0]
        return attended

    def settle(self, h_BLM: Tensor, attended_BLM: Tensor, keys: SampleKeys) -> tuple[Tensor, Tensor]:
        raise AssertionError(f"no ranks share attention here: {h_BLM.shape}, {attended_BLM.shape}, {keys}")

    def add(self, residual_BLM: Tensor, out_TM: Tensor, keys: SampleKeys) -> Tensor:
        del keys
        out_BLM = out_TM.unflatten(0, residual_BLM.shape[:2]).to(residual_BLM.dtype)
        return self._family.finish(self.layer, residual_BLM, out_BLM)

    def partial_parameters(self) -> list[nn.Parameter]:
        """Return whole parameters that compute before or beside shards of weights, see `ModelParts`."""
        if (shared := self._shared_if_any) is None:
            return []
        parameters = [] if shared.norm is None else list(shared.norm.parameters())
        for stand in filter(None, (shared.attention, shared.dense)):
            cut: dict[str, object] = getattr(stand.module, "shardings", {})
            parameters += [p for name, p in stand.module.named_parameters() if name not in cut]
        return parameters

    def token_parameters(self) -> list[nn.Parameter]:
        """Return whole parameters that compute on tokens one by one after attention."""
        return []

    def _beside(self, cut: nn.Module) -> list[nn.Parameter]:
        """Return the layer's parameters outside of shared attention, its norm, and what else is cut."""
        if self._shared_if_any is None:
            return []
        norm = [] if self._shared_if_any.norm is None else [self._shared_if_any.norm]
        ids = {
            id(p) for each in (self._shared_if_any.attention.module, *norm, cut) for p in each.parameters()
        }
        return [p for p in self.layer.parameters() if id(p) not in ids]

    def _run(self, h_BLM: Tensor, call: LayerCall) -> Tensor:
        """Run the layer as the decoder has called it; return hidden states."""
        with self._calls.inside.step():
            out: Any = self.layer(h_BLM, *call.arguments, **call.named)
        out_BLM: Tensor = out[0] if isinstance(out, tuple) else out
        return out_BLM

    @contextmanager
    def _attended(self, attended_BLM: Tensor) -> Iterator[None]:
        """Let the layer, inside this context, take this for what its attention returns."""
        self._shared.attention.attended_BLM = attended_BLM
        try:
            yield
        finally:
            self._shared.attention.attended_BLM = None


class CutLayer(_Layer):
    """A layer with experts: `attend` runs it up to their call, `add` applies their outputs.

    Where ranks share attention, shared experts, router and norms are whole, and work on this rank's tokens.
    """

    def __init__(
        self,
        layer: Any,
        index: int,
        moe: MoELayer,
        cut: Cut,
        calls: Calls,
        family: Family,
        shared: SharedLayer | None = None,
    ) -> None:
        super().__init__(layer, index, calls, family, shared)
        self.cut, self.moe, self.experts = cut, moe, moe
        self.code = {each: code_of(each) for each in in_parts(layer, cut.block, family)}

    def attend(self, h_BLM: Tensor, keys: SampleKeys) -> tuple[Tensor, Tensor]:
        if not len(h_BLM):
            return self._nothing(h_BLM)
        called = self._calls.of(keys)
        return self._until_experts(h_BLM, called, called.attended_T)

    def settle(self, h_BLM: Tensor, attended_BLM: Tensor, keys: SampleKeys) -> tuple[Tensor, Tensor]:
        if not h_BLM.numel():
            return self._nothing(h_BLM + attended_BLM)
        called = self._calls.of(keys)
        attended_T = called.attended_T
        if attended_T is not None:
            here = slice(keys.first_token, keys.first_token + h_BLM.shape[1])
            attended_T = attended_T.view(len(h_BLM), -1)[:, here].flatten()
        with self._attended(attended_BLM):
            return self._until_experts(h_BLM, called, attended_T)

    def _nothing(self, h_BLM: Tensor) -> tuple[Tensor, Tensor]:
        """Return what `attend` does where there are no tokens, on which the layer itself cannot run."""
        x_TM = h_BLM.flatten(0, 1)
        none_Tk = x_TM.new_empty(0, self.cut.top_k)
        caught = Caught(x_TM, none_Tk.long(), none_Tk, x_TM.new_empty(0, self.experts.num_experts))
        self.cut.put(replace(caught, routers=self._calls.routers))
        return h_BLM, x_TM

    def _until_experts(
        self, h_BLM: Tensor, called: Called, attended_T: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run the layer up to its experts; return the residual stream [B, L, M], and what they get [T, M]."""
        with self.cut.open():
            residual_BLM = self._run(h_BLM, called.layers[self.index])
        caught = self.cut.take()
        self.cut.put(replace(caught, attended_T=attended_T, routers=called.routers))
        return residual_BLM, caught.x_TM

    def here(self) -> Tensor:
        """Return the MoE block's output for the tokens of `attend`, with all experts on this rank, [T, M]."""
        caught = self.cut.take()
        out_TM, shared = self.cut.run(caught), self.experts.shared
        return out_TM if shared is None else out_TM + shared(caught.x_TM)

    def dense(self, x_TM: Tensor) -> Tensor:
        raise AssertionError(f"layer {self.index} has experts for {list(x_TM.shape)}")

    def token_parameters(self) -> list[nn.Parameter]:
        return self._beside(self.cut.experts)


class WholeLayer(_Layer):
    """A layer without experts, which is one task as a whole."""

    def attend(self, h_BLM: Tensor, keys: SampleKeys) -> tuple[Tensor, Tensor]:
        out_BLM = self._run(h_BLM, self._calls.of(keys).layers[self.index]) if len(h_BLM) else h_BLM
        return out_BLM, out_BLM.flatten(0, 1)

    def dense(self, x_TM: Tensor) -> Tensor:
        return x_TM

    def add(self, residual_BLM: Tensor, out_TM: Tensor, keys: SampleKeys) -> Tensor:
        del out_TM, keys  # the layer has added it already
        return residual_BLM


class SharedDenseLayer(WholeLayer):
    """A layer without experts of which ranks share attention, and the feed-forward part by its width."""

    add = _Layer.add

    @property
    def _dense(self) -> Skipped:
        assert self._shared.dense is not None, "a layer without experts has a dense part"
        return self._shared.dense

    def settle(self, h_BLM: Tensor, attended_BLM: Tensor, keys: SampleKeys) -> tuple[Tensor, Tensor]:
        if not h_BLM.numel():
            residual_BLM = h_BLM + attended_BLM
            return residual_BLM, residual_BLM.flatten(0, 1)
        call = self._calls.of(keys).layers[self.index]
        with self._attended(attended_BLM), self._dense.skipping() as entered:
            residual_BLM = self._run(h_BLM, call)
        return residual_BLM, entered[0].flatten(0, 1)

    def dense(self, x_TM: Tensor) -> Tensor:
        with self._calls.inside.step():
            out_TM: Tensor = self._dense.plain(x_TM)
        return out_TM

    def token_parameters(self) -> list[nn.Parameter]:
        return self._beside(self._dense.module)


Layers = Sequence[CutLayer | WholeLayer]


class Decoder:
    """The pieces of a model of transformers.

    Attributes:
        parts: The layers in pieces.
        kind: The model's class.
        plain: The model's own `forward`, which takes the model first.
        base_kind: The class of the module with the layers.
        code: The functions of `base_kind`.
        calls: How the decoder calls layers in steps.
        left: Hidden states after the last layer, of every microbatch of the last step with labels, by the
            place of these labels in memory.
    """

    def __init__(
        self,
        model: Any,
        family: Family,
        layers: Layers,
        calls: Calls,
        plain: Callable[..., Any],
        shares: TensorShares | None = None,
    ) -> None:
        self._shares = shares
        self.parts, self.model, self.family, self.calls, self.plain = layers, model, family, calls, plain
        self.kind, self.base_kind, self.code = type(model), type(self.base), code_of(self.base)
        self._inputs, self._length = Inputs(), 0
        self.left: dict[int, Tensor] = {}

    def begin(self, inputs: Inputs) -> None:
        """Begin the forward pass of a step on these samples."""
        self._inputs = inputs
        # Samples have to stay where they are, if something is given for each of them.
        stay = inputs.mask_BL is not None or inputs.positions_BL is not None or bool(inputs.packed)
        self.calls.make = None if stay else self._calls_for
        self.calls.routers = inputs.routers
        self.calls.begin()
        self.left.clear()

    def embed(self, tokens_BL: Tensor, keys: SampleKeys) -> Tensor:
        """Run the decoder up to its first layer, and record how it calls each layer."""
        if not len(tokens_BL):
            return torch.zeros(*tokens_BL.shape, self.hidden_size, dtype=self.dtype, device=tokens_BL.device)
        self._length = tokens_BL.shape[1]
        try:
            calls, entered_BLM = self._entering(tokens_BL, keys)
        except IndexError:
            check_vocabulary("token", tokens_BL, self.model.get_input_embeddings().num_embeddings)
            raise
        self.calls.put(keys, calls, self._inputs)
        return entered_BLM

    def _entering(self, tokens_BL: Tensor, keys: SampleKeys) -> tuple[list[LayerCall], Tensor]:
        """Return how the decoder calls each layer, and what the first one gets."""
        calls: list[LayerCall] = []
        entered: list[Tensor] = []
        given = self._inputs.of(keys)
        if (documents_BL := keys.documents_BL) is not None:
            # By positions that begin anew transformers separates documents.
            places_L = torch.arange(documents_BL.shape[1], device=documents_BL.device)
            given["position_ids"] = places_L - documents_BL
        with self._recording(calls, entered) as base, self.calls.inside.step():
            base(input_ids=tokens_BL, use_cache=False, **given)
        return calls, entered[0]

    def _calls_for(self, keys: SampleKeys) -> list[LayerCall]:
        """Return how the decoder would call each layer for these samples, whose tokens do not matter."""
        ids_B = keys.sample_ids_B
        with torch.no_grad():
            return self._entering(ids_B.new_zeros(len(ids_B), self._length), keys)[0]

    @property
    def separates_documents(self) -> bool:
        """Whether tokens attend to their own document alone, if keys tell documents apart."""
        return self.family.separates_documents

    def head(self, h_BLM: Tensor, labels_BL: Tensor) -> Tensor:
        self.left[int(labels_BL.storage_offset())] = h_BLM.detach()
        if not self.has_vocabulary:
            return h_BLM.new_zeros(())
        return cross_entropy_sum(self.logits(h_BLM), labels_BL.flatten())

    @property
    def computes_loss(self) -> bool:
        """Whether steps compute the model's loss of labels themselves: that of next tokens, as it is in
        transformers."""
        from transformers.loss.loss_utils import ForCausalLMLoss

        return self.has_vocabulary and self.model.loss_function is ForCausalLMLoss

    @property
    def has_vocabulary(self) -> bool:
        """Whether the model's head is one over the vocabulary."""
        return self.model.get_output_embeddings() is not None

    def normed(self, h_BLM: Tensor) -> Tensor:
        """Return what the decoder returns for the output of its last layer."""
        normed_BLM: Tensor = self.base.get_submodule(self.family.norm)(h_BLM)
        return normed_BLM

    def logits(self, h_BLM: Tensor) -> Tensor:
        """Return the logits that the model computes from the output of its last layer."""
        base = self.base
        if not self.has_vocabulary:
            return h_BLM.new_zeros(h_BLM.shape[:2].numel(), 1)
        if not len(h_BLM):
            weight: Tensor = self.model.get_output_embeddings().weight
            return h_BLM.flatten(0, 1) @ weight.to(h_BLM.dtype).t()
        positions_1L = torch.arange(h_BLM.shape[1], device=h_BLM.device).unsqueeze(0)  # else some models ask
        with self.calls.inside.step(), _instead(base, self.normed(h_BLM)):  # for those of the batch before
            out = self.plain(self.model, inputs_embeds=h_BLM, position_ids=positions_1L, use_cache=False)
        logits_TV: Tensor = out.logits.flatten(0, 1)
        return logits_TV

    def outside_layers(self) -> list[nn.Parameter]:
        """Return the parameters of all modules beside the layers: embeddings, the norm, heads.

        Every step asks for them, so layers are passed over, and not looked through.
        """
        layers = self.base.get_submodule(self.family.layers)
        parameters: dict[int, nn.Parameter] = {}
        modules: list[nn.Module] = [self.model]
        while modules:
            module = modules.pop()
            parameters |= {id(p): p for p in module._parameters.values() if p is not None}
            modules += [each for each in module._modules.values() if each not in (None, layers)]
        return list(parameters.values())

    @property
    def cut_layers(self) -> list[CutLayer]:
        """The layers with experts."""
        return [part for part in self.parts if isinstance(part, CutLayer)]

    def check_shared(self) -> None:
        """Raise ValueError if what ranks share is no longer as it was when they began."""
        if self._shares is not None:
            self._shares.check()

    @property
    def base(self) -> Any:
        return self.family.decoder(self.model)

    @property
    def layers(self) -> list[Any]:
        """The layers that the model has now."""
        return list(self.base.get_submodule(self.family.layers))

    @property
    def coefficient(self) -> float | None:
        """Weight of the balance loss, read where the model's own code reads it; None where it has none."""
        return coefficient_of(self.model, self.family)

    @property
    def hidden_size(self) -> int:
        size: int = self.base.config.get_text_config().hidden_size
        return size

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = next(self.model.parameters()).dtype
        return dtype

    def replicated_parameters(self, layer: int) -> list[nn.Parameter]:
        experts = {id(p) for p in self.expert_parameters(layer)}
        layers = self.layers
        parameters = [p for p in layers[layer].parameters() if id(p) not in experts]
        if layer == 0:  # even where it is the head: a parameter is reduced with the lowest layer that uses it
            parameters += self.model.get_input_embeddings().parameters()
        if layer == len(layers) - 1:
            parameters += self.base.get_submodule(self.family.norm).parameters()
            parameters += self.model.get_output_embeddings().parameters() if self.has_vocabulary else []
        return parameters

    def expert_parameters(self, layer: int) -> list[nn.Parameter]:
        moe = self.parts[layer].moe
        return [] if moe is None else list(moe.experts.parameters())

    def partial_parameters(self, layer: int) -> list[nn.Parameter]:
        parameters = self.parts[layer].partial_parameters()
        if layer == 0:  # the norm, and heads of which every rank makes a loss
            cut = {id(self.model.get_parameter(name)) for name in shardings_of(self.model)}
            parameters += [p for p in self.outside_layers() if id(p) not in cut]
        return parameters

    def token_parameters(self, layer: int) -> list[nn.Parameter]:
        return self.parts[layer].token_parameters()

    @contextmanager
    def _recording(self, calls: list[LayerCall], entered: list[Tensor]) -> Iterator[Any]:
        base, path = self.base, self.family.layers
        parent_path, _, name = path.rpartition(".")
        parent = base.get_submodule(parent_path)
        layers = parent._modules[name]
        parent._modules[name] = nn.ModuleList(_Recorder(layer, calls, entered) for layer in layers)
        hooked = base.__dict__.get(HOOKED, False)
        setattr(base, HOOKED, True)  # transformers would put its hooks on the recorders, and on no layer
        try:
            yield base
        finally:
            parent._modules[name] = layers
            setattr(base, HOOKED, hooked)


@contextmanager
def _instead(base: nn.Module, hidden_BLM: Tensor) -> Iterator[None]:
    """Skip the decoder inside this context: `hidden_BLM` takes the place of the output of its last norm."""
    from transformers.modeling_outputs import MoeModelOutputWithPast

    base.forward = lambda *_, **__: MoeModelOutputWithPast(last_hidden_state=hidden_BLM)
    try:
        yield
    finally:
        del base.forward
