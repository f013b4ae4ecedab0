"""Tensors in files, of any kind: what they are is known before any of them is read.

Nothing here runs code from a file or believes its sizes: pickles are read with weights_only, arrays
without pickle, and a file that claims much more than it holds is refused.
"""

from __future__ import annotations

import json
import math
import re
import zipfile
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitrail.weights.errors import LoadError, some

# A file's tensors take as much memory as the file, or more if it is compressed or they share some.
MOST_INFLATION = 20
MOST_INFLATION_OF_SMALL = 16 * 1024**2

# Safetensors' names of types → torch's.
TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

# What training scripts put around a model's tensors; averaged weights come first.
WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model", "teacher")
# What torch.compile puts into names wherever a part was compiled, and DistributedDataParallel before all.
COMPILED = r"(?<![^.])_orig_mod\."
DISTRIBUTED = r"^module\."

T = TypeVar("T")


class Stored(NamedTuple):
    """A tensor in a file."""

    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[], Tensor]


class Contents(NamedTuple):
    """The tensors of a file by name, and what else it says of itself."""

    tensors: dict[str, Stored]
    metadata: dict[str, Any]


def read_file(path: Path) -> Contents:
    """What is in a file of weights; its kind is recognised by its first bytes, not by its name."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(256)
    if size == 0:
        raise LoadError(f"{path} is empty (0 bytes): download or copy it again")
    if start.startswith(b"version https://git-lfs"):
        raise LoadError(
            f"{path} is only a pointer to the weights: run `git lfs pull` in the folder it is from"
        )
    read = next((reader for is_one, reader in KINDS if is_one(path, start)), None)
    if read is None:
        raise LoadError(
            f"{path} holds no weights of a known kind; expected safetensors, a PyTorch state dict or "
            "an .npz. If it should be one, it is damaged or truncated: download it again"
        )
    contents = read(path)
    claimed = sum(math.prod(s.shape) * s.dtype.itemsize for s in contents.tensors.values())
    if claimed > max(MOST_INFLATION * size, MOST_INFLATION_OF_SMALL):
        raise LoadError(
            f"{path} has {size:,} bytes and claims tensors of {claimed:,} bytes: it is damaged, or "
            "made to exhaust memory"
        )
    return Contents(_plain_names(contents.tensors, path), contents.metadata)


def read_shards(index: Path) -> Contents:
    """The tensors of all files that an index (model.safetensors.index.json) names, each from its own."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(map(_is_file_name, weight_map.values())):
        raise LoadError(f"{index} has no weight_map from names of tensors to files beside it")
    weight_map = _plain_names(weight_map, index)
    tensors: dict[str, Stored] = {}
    for shard in sorted(set(weight_map.values())):
        path = index.parent / shard
        if not path.is_file():
            raise LoadError(f"{index} names {shard}, which is not there: download it too")
        found = read_file(path).tensors
        named = {name for name, place in weight_map.items() if place == shard}
        if odd := sorted(found.keys() ^ named):
            raise LoadError(
                f"{index} and {shard} do not agree where to find {some(odd)}: they are not of one model, so "
                "download both again"
            )
        tensors |= found
    return Contents(tensors, {})


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise LoadError(f"{path} holds {type(content).__name__}; expected an object {{…}}")
    return content


def _is_file_name(name: object) -> bool:
    return isinstance(name, str) and name not in ("", "..") and Path(name).name == name


def plain_name(name: str) -> str:
    """A tensor's name without what torch.compile puts into it."""
    return re.sub(COMPILED, "", name)


def renamed(named: Mapping[str, T], patterns: Mapping[str, str], where: object) -> dict[str, T]:
    """The same by the names that patterns → replacements make, each of which may be there once."""
    found: dict[str, T] = {}
    for name, value in named.items():
        for pattern, new in patterns.items():
            name = re.sub(pattern, new, name)
        if name in found:
            raise LoadError(f"{where} has {name} twice, once by another name for the same")
        found[name] = value
    return found


def _plain_names(named: Mapping[str, T], where: object) -> dict[str, T]:
    """The same without what wrappers around a model put into its tensors' names."""
    plain = renamed(named, {COMPILED: ""}, where)
    while plain and all(re.match(DISTRIBUTED, name) for name in plain):
        plain = renamed(plain, {DISTRIBUTED: ""}, where)
    return plain


def _read_safetensors(path: Path) -> Contents:
    try:
        file = safe_open(path, framework="pt")
        tensors = {}
        for name in file.keys():  # noqa: SIM118 (it is no dict)
            part = file.get_slice(name)
            if part.get_dtype() not in TYPES:
                raise LoadError(f"{path}: {name} has type {part.get_dtype()}, which is not read")
            tensors[name] = Stored(
                torch.Size(part.get_shape()),
                TYPES[part.get_dtype()],
                partial(file.get_tensor, name),
            )
        return Contents(tensors, dict(file.metadata() or {}))
    except SafetensorError as error:
        raise LoadError(
            f"{path} is no intact safetensors file ({error}): download or copy it again"
        ) from None


def _read_pickle(path: Path) -> Contents:
    try:
        content = _unpickled(path)
    except Exception as error:  # whatever a damaged or hostile pickle leads to
        forbidden = re.search(r"unsupported .*?GLOBAL ([\w.]+)", str(error), re.IGNORECASE)
        if forbidden:
            raise LoadError(
                f"{path} holds more than tensors ({forbidden[1]}), and loading that could run code, so "
                "it was not loaded. If you trust it, save its tensors alone from where it was made: "
                "torch.save(model.state_dict(), file)"
            ) from None
        raise LoadError(
            f"{path} is no intact PyTorch file ({type(error).__name__}): download or copy it again"
        ) from None
    state = _unwrapped(content)
    if not state:
        raise LoadError(f"{path} holds no state dict; expected names with a tensor each")
    odd = [name for name, value in state.items() if not _is_plain_tensor(name, value)]
    if odd:
        raise LoadError(f"{path}: {odd[0]!r} is no ordinary tensor; expected a state dict of them")
    tensors = {name: Stored(tensor.shape, tensor.dtype, tensor.detach) for name, tensor in state.items()}
    metadata = getattr(state, "_metadata", None)  # what torch keeps beside a state dict, by module
    own = metadata.get("") if isinstance(metadata, dict) else None
    return Contents(tensors, own if isinstance(own, dict) else {})


def _unpickled(path: Path) -> Any:
    # torch takes a name with this ending at its word.
    if zipfile.is_zipfile(path) and path.suffix != ".safetensors":
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    with path.open("rb") as file:
        return torch.load(file, map_location="cpu", weights_only=True)


def _unwrapped(content: Any) -> dict[str, Any]:
    """The state dict inside of what a training script saved."""
    while isinstance(content, dict):
        inner = next((key for key in WRAPPERS if isinstance(content.get(key), dict)), None)
        if inner is None:
            return content
        content = content[inner]
    return {}


def _is_plain_tensor(name: object, value: object) -> bool:
    return (
        isinstance(name, str)
        and isinstance(value, Tensor)
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and not value.is_quantized
    )


def _read_npz(path: Path) -> Contents:
    try:
        with zipfile.ZipFile(path) as archive:
            headers = {info.filename: _npy_header(archive, info) for info in archive.infolist()}
    except Exception as error:  # whatever a damaged or hostile archive leads to
        raise LoadError(
            f"{path} is no intact .npz file of plain arrays ({error}): download or copy it again"
        ) from None

    @cache  # opened once, and not before something is read
    def arrays() -> Any:
        return np.load(path, allow_pickle=False)

    def read(name: str) -> Tensor:
        try:
            return _tensor(arrays()[name])
        except Exception as error:  # as above
            raise LoadError(f"{path} is damaged at {name} ({error}): download it again") from None

    tensors = {}
    for file, (shape, dtype) in headers.items():
        name = file.removesuffix(".npy")
        tensors[name] = Stored(shape, dtype, partial(read, name))
    return Contents(tensors, {})


def _npy_header(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> tuple[torch.Size, torch.dtype]:
    """Shape and type of an array, checked against the bytes that are there for it."""
    with archive.open(info) as file:
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        if version not in read:
            raise ValueError(f"{info.filename} is of version {version}")
        shape, _, dtype = read[version](file)
        if dtype.hasobject or file.tell() + math.prod(shape) * dtype.itemsize != info.file_size:
            raise ValueError(f"{info.filename} claims {shape} of {dtype}")
    return torch.Size(shape), _tensor(np.empty(0, dtype)).dtype


def _tensor(array: np.ndarray) -> Tensor:
    if array.dtype == np.dtype("V2"):  # what numpy makes of a bfloat16 that it does not know
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    try:
        return torch.from_numpy(array)
    except TypeError:
        raise ValueError(f"arrays of {array.dtype} cannot be read") from None


def _is_zip(start: bytes) -> bool:
    return start.startswith(b"PK\x03\x04")


def _is_npz(path: Path, start: bytes) -> bool:
    if not _is_zip(start):
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith(".npy") for name in archive.namelist())
    except Exception:  # damaged, and then its reader says so
        return b".npy" in start  # the name of the first array, where the list of all is cut off


# How each kind begins, and who reads it. The length that safetensors begin with can be any byte.
KINDS: tuple[tuple[Callable[[Path, bytes], bool], Callable[[Path], Contents]], ...] = (
    (lambda path, start: start[8:9] == b"{", _read_safetensors),
    (_is_npz, _read_npz),
    (lambda path, start: _is_zip(start) or start.startswith(b"\x80"), _read_pickle),
)
