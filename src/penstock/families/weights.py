"""Weights in a folder of safetensors files, read tensor by tensor on demand, and their places in a model.

transformers stacks the experts of a layer when it reads a model, and takes them apart when it writes one.
What it takes apart are views of the parameters, so a checkpoint reads and writes a model in place, by the
names that its files have, and no tensor is in memory twice. transformers itself reads no file in a folder but
config.json: adapters, code and settings that lead elsewhere are not followed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.overrides import TorchFunctionMode

from penstock.checkpoint.folder import INDEX, ONE, model_files
from penstock.checkpoint.storage import NOT_FINITE, fills, first_not_finite
from penstock.config import UNSET, ConfigError
from penstock.families.described import (
    COPY,
    Held,
    check_code,
    config_of,
    empty_model,
    in_one_line,
    quiet,
    read_generation,
    read_table,
    refuse_cut_off,
)
from penstock.models.qwen3_moe import CONFIG
from penstock.words import some_of

TEXT = "language_model."
BESIDE_TEXT = ("vision_model.", "vision_tower.", "multi_modal_projector.", "audio_tower.")
"""Beginnings of names in a model that also sees or hears: in its text part, and in others."""

EXPERT = re.compile(r"\.experts\.(\d+)\.")
"""Pattern in the name of a tensor that belongs to one expert."""

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Types in which models compute, by their names in safetensors."""

QUANTIZED = ("F4", "F6", "F8", "I8", "U8")
"""Beginnings of the names of such types: F8_E4M3 and the like."""

LAYER = re.compile(r".*?\.\d+\.")
"""Beginning of the names of all tensors of a layer."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor in a file, of which `rows` are wanted: transformers reads it by `[...]`, once, as it loads.

    Attributes:
        name: Its name in the file.
        shape: Shape of the whole tensor.
        kind: Type of its numbers, as safetensors calls it.
        rows: The rows that are wanted; None = all.
    """

    file: Path
    name: str
    shape: Sequence[int]
    kind: str
    rows: slice | None = None

    @property
    def dtype(self) -> torch.dtype | None:
        """The type of its numbers; None if it is none of those in which models compute."""
        return DTYPES.get(self.kind)

    def __getitem__(self, everything: Any) -> Tensor:
        """Read the values into memory of their own: the file is closed again.

        Raises ConfigError, naming file and tensor, if one of them is not finite.
        """
        del everything
        with safe_open(self.file, framework="pt") as opened:
            stored: Any = opened.get_slice(self.name)
            read: Tensor = (stored[...] if self.rows is None else stored[self.rows]).clone()
        if first_not_finite([(self.name, read)]) is not None:
            raise ConfigError(str(self.file), UNSET, f"{self.name} {NOT_FINITE}", f"{COPY}.")
        return read


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return all tensors of a folder, by name; of a model that also sees or hears, those of its text part.

    Raises:
        ValueError: If the folder holds no complete set of safetensors.
    """
    files = [folder / name for name in model_files(folder)]
    if not files or not all(file.exists() for file in files):
        refuse_cut_off(folder)
    if not files:
        raise ValueError(
            f"{folder} holds neither {ONE} nor {INDEX}. Give a folder that save_pretrained has written, or "
            "download the model's files first: hf download NAME --local-dir FOLDER"
        )
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  # no dictionary
                    if not name.startswith(BESIDE_TEXT):
                        stored: Any = opened.get_slice(name)
                        tensors[name.removeprefix(TEXT)] = StoredTensor(
                            file=file, name=name, shape=stored.get_shape(), kind=stored.get_dtype()
                        )
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{file} cannot be read as safetensors: {error}. {COPY}") from error
    if not tensors:
        raise ValueError(f"{', '.join(map(str, files))}: no tensors are in there. {COPY}")
    return tensors


def share_of_experts(
    tensors: Mapping[str, StoredTensor],
    model: Any,
    stacked: Mapping[str, int],
    held: Sequence[int],
    num_experts: int,
) -> dict[str, StoredTensor]:
    """Return the tensors of a whole model that a rank needs: of experts only `held`, which are consecutive.

    Args:
        tensors: All tensors of the model's files, by name.
        model: The model, on any device; its names are read.
        stacked: By the name of every parameter that holds experts, the number of its rows that belong to one.
        held: Numbers of this rank's experts.

    Raises:
        ValueError: There are not `num_experts` experts of every kind; all ranks raise it, as all look at the
            experts of all.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    names = model.state_dict()
    wanted: dict[str, StoredTensor] = {}
    numbers: dict[str, set[int]] = {}
    wrong: list[str] = []
    for name, tensor in tensors.items():
        target, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, names)
        rows = stacked.get(name if name in stacked else target)
        number = EXPERT.search(name)
        if rows is None:
            wanted[name] = tensor
        elif number is None:
            if tensor.shape[0] != num_experts * rows:
                wrong.append(f"{name} {tensor.shape}")
            first = held[0] * rows
            wanted[name] = replace(tensor, rows=slice(first, first + len(held) * rows))
        else:
            numbers.setdefault(EXPERT.sub(".experts.*.", name), set()).add(int(number[1]))
            if int(number[1]) in held:
                wanted[name] = tensor
    for name, present in numbers.items():
        if missing := set(range(num_experts)) - present:
            wrong.append(f"{name} of all experts but {some_of(sorted(map(str, missing)))}")
        if surplus := present - set(range(num_experts)):
            wrong.append(f"{name} of expert {some_of(sorted(map(str, surplus)))}")
    if wrong:
        folder = next(iter(tensors.values())).file.parent
        raise ValueError(
            f"{folder} does not hold the {num_experts} experts of its {CONFIG}: it has {some_of(wrong)}. "
            f"Copy the weights and {CONFIG} from one place"
        )
    return wanted


@dataclass(frozen=True)
class Place:
    """Where a tensor of a file lies.

    Attributes:
        source: Name of the parameter or buffer.
        shape: Shape of the tensor in the file.
        stride: Strides between its elements in the parameter.
        offset: Place of its first element in the parameter, counted in elements.
    """

    source: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def view(self, tensor: Tensor) -> Tensor:
        """Return the tensor of the file as a view of its source."""
        return tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.offset)


def places_of(
    model: Any, tensors: Mapping[str, Tensor], spread: Collection[str], first: int, *, original: bool = True
) -> Mapping[str, Place]:
    """Return where the tensors of a model's files lie, by their names.

    Args:
        model: A model of transformers, which may hold a part of its experts alone.
        tensors: Its parameters and buffers that are saved, contiguous, by name.
        spread: Names of parameters that hold a part of the experts.
        first: Number of the first expert of that part.
        original: Whether files have the names of published models, and not those of the model's parameters.
    """
    from transformers.core_model_loading import revert_weight_conversion

    described = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
    with _InPlace():
        written = revert_weight_conversion(model, dict(described)) if original else described
    sources = {tensor.untyped_storage()._cdata: name for name, tensor in described.items()}
    by_source: dict[str, dict[str, Place]] = {source: {} for source in sorted(tensors)}  # alike on all ranks
    for name, tensor in written.items():
        source = sources.get(tensor.untyped_storage()._cdata)
        if source is not None:
            place = Place(source, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
            its = name
            if source in spread:  # experts have their numbers in the whole model
                its = EXPERT.sub(lambda number: f".experts.{int(number[1]) + first}.", name)
            by_source[source][its] = place
    for source, places in by_source.items():
        tensor = described[source]
        boxes = [_box(tensor, place) for place in places.values()]
        if None in boxes or not fills(tensor.shape, [box for box in boxes if box is not None]):
            # What is no view is left as the model has it: transformers reads that, too.
            by_source[source] = {source: Place(source, tuple(tensor.shape), tensor.stride(), 0)}
    return {name: place for places in by_source.values() for name, place in places.items()}


def _box(source: Tensor, place: Place) -> ChunkStorageMetadata | None:
    """Return which box of a tensor lies at a place, as it is or transposed; None if none does."""
    ways = {stride: size for stride, size in zip(place.stride, place.shape, strict=True) if size > 1}
    offsets, sizes, rest = [0] * source.dim(), [1] * source.dim(), place.offset
    for dim in sorted(range(source.dim()), key=source.stride, reverse=True):
        if source.shape[dim] > 1:
            offsets[dim], rest = divmod(rest, source.stride(dim))
            sizes[dim] = ways.get(source.stride(dim), 1)
    box = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
    return box if box.sizes.numel() == prod(place.shape) else None


class _InPlace(TorchFunctionMode):
    """Leaves out copies: what transformers copies to write it stays a view."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func in (Tensor.contiguous, Tensor.clone, torch.clone):
            return args[0]
        return func(*args, **(kwargs or {}))


def saved_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what is saved of a model: every parameter once, and the buffers that its state has."""
    kept = model.state_dict().keys() - set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in kept:
            yield name, tensor


@dataclass(frozen=True)
class ModelFolder:
    """The files of a model.

    Attributes:
        path: The folder.
        model: The model without values; the text part of one that also sees or hears.
        tensors: What the files hold of it, by name.
    """

    path: Path
    model: Any
    tensors: Mapping[str, StoredTensor]

    @classmethod
    def open(cls, path: Path, kind: Any = None) -> ModelFolder:
        """Open a folder.

        Args:
            kind: The model's class; None = that of a causal language model.

        Raises:
            ValueError: The folder holds no such model, or its configuration asks for code, or for quantized
                weights; the message names the file at fault.
        """
        import transformers  # noqa: F401  # where it is missing, that is said first

        file = path / CONFIG
        if not file.is_file():
            refuse_cut_off(path)
            raise ValueError(
                f"{path} holds no {CONFIG}. Give a folder that save_pretrained has written, or download the "
                "model's files first: hf download NAME --local-dir FOLDER"
            )
        table = read_table(file)
        if not isinstance(table.get("model_type"), str):
            why = "is not there, so it is not known what model the folder is of"
            raise ConfigError(f"{file}: model_type", UNSET, why, f"{COPY}.")
        check_code(file, table)
        if pipe := next((each for each in path.iterdir() if each.is_fifo()), None):  # reading would wait
            raise ConfigError(str(pipe), UNSET, "is a pipe, not a file", f"{COPY}.")
        tensors = stored_tensors(path)
        files = {each.file for each in tensors.values()}
        held = Held(len(tensors), sum(each.stat().st_size for each in files))
        model = empty_model(file, config_of(file, table, held), held, kind)
        return cls(path, model, tensors)

    @property
    def config(self) -> Any:
        """Configuration of the model."""
        return self.model.config

    @property
    def dtype(self) -> torch.dtype:
        """The type of the model by its configuration, or of its first tensor, or float32."""
        dtype: torch.dtype | None = self.config.dtype or next(iter(self.tensors.values())).dtype
        return torch.float32 if dtype is None else dtype

    def read(self, kind: Any, tensors: Mapping[str, StoredTensor] | None, dtype: torch.dtype) -> Any:
        """Return a model of this class with values of these tensors.

        Args:
            kind: The class.
            tensors: None = all of the files, under the names that they have there.
            dtype: Type of the model's weights.

        Raises:
            ValueError: A tensor is missing, which transformers would draw by chance, or is not the model's.
        """
        generation = read_generation(self.path)
        try:
            with quiet():
                model, loading = kind.from_pretrained(
                    self.path if tensors is None else None,
                    config=self.config,
                    state_dict=None if tensors is None else dict(tensors),
                    dtype=dtype,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # they are reported, and refused below
                )
        except ConfigError:
            raise
        except Exception as error:  # whatever a model's own code raises
            raise ValueError(f"{self.path}: its model cannot be read: {in_one_line(error)}") from error
        misshapen = [
            f"{name} ({list(stored)} there, {list(wanted)} by {CONFIG})"
            for name, stored, wanted in loading["mismatched_keys"]
        ]
        unexpected = [name for name in loading["unexpected_keys"] if not name.startswith(BESIDE_TEXT)]
        differences = {"missing": loading["missing_keys"], "unexpected": unexpected, "misshapen": misshapen}
        problems = [
            f"{what}: {some_of(sorted(map(str, names)))}" for what, names in differences.items() if names
        ]
        if problems:
            raise ValueError(
                f"{self.path} does not hold the model of its {CONFIG}: {'; '.join(problems)}. Copy the "
                f"weights and {CONFIG} from one place"
            )
        model.config._name_or_path = str(self.path)
        if generation is not None:
            model.generation_config = generation
        return model


NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
"""Name of a model on the hub: its owner and its own."""

WANTED = ("*.json", "*.safetensors", "tokenizer.model", "*.jinja")
"""Names of files that a model and its tokenizer are read from."""


def folder_of(named: str | Path) -> Path:
    """Return the folder that is named, or that of the files of a model on the hub, which is named as there.

    They come from the library's cache (`HF_HOME`), where they are downloaded to if they are not there. Ranks
    of a node wait for each other's files.

    Raises:
        ValueError: Where the hub gives no such model.
    """
    path = Path(named)
    if path.exists() or isinstance(named, Path) or not NAME.fullmatch(named):
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(named, allow_patterns=list(WANTED), ignore_patterns=["*/*"]))
    except Exception as error:  # those of the library and of several libraries below it
        raise ValueError(
            f"{named} is no folder here, and the Hugging Face hub does not give a model of this name: "
            f"{in_one_line(error)}"
        ) from error
