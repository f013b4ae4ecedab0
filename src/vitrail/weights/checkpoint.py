"""From what a person names (a folder, a file, a hub id) to configurations and tensors."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from vitrail.models.registry import TABLE, names
from vitrail.weights.errors import LoadError, explained
from vitrail.weights.files import Stored, read_file, read_json, read_shards
from vitrail.weights.writing import CONFIG, MODELS, PROCESSOR, WEIGHTS

# The files of weights that a folder may hold, the best first → the pieces that belong to it.
KNOWN_FILES = {
    WEIGHTS: (),
    "model.safetensors.index.json": ("model-*.safetensors",),
    "pytorch_model.bin": (),
    "pytorch_model.bin.index.json": ("pytorch_model-*.bin",),
}
ENDINGS = (".safetensors", ".npz", ".pth", ".pt", ".bin")
CONFIGS = (CONFIG, PROCESSOR)
SIZES_IN_WORDS = {"tiny": "ti", "small": "s", "base": "b", "large": "l", "huge": "h", "giant": "g"}
EXPECTED = (
    "Expected a folder, a file, or a hub id such as 'google/vit-base-patch16-224' or "
    "'timm/vit_tiny_patch16_224.augreg_in21k@main'"
)
HUB_ID = re.compile(r"(?:hf[-_]hub:)?(?P<id>(?!\.)[\w.-]+/[\w.-]+?)(?:@(?P<revision>[^@]+))?")


@dataclass(frozen=True)
class Checkpoint:
    """Everything that was found: where, the tensors, and what is said of them."""

    where: str
    file: Path
    tensors: dict[str, Stored]
    metadata: dict[str, Any] = field(default_factory=dict)  # inside the file of weights
    config: dict[str, Any] = field(default_factory=dict)  # config.json
    processor: dict[str, Any] = field(default_factory=dict)  # preprocessor_config.json


def open_checkpoint(
    source: str | os.PathLike[str],
    *,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    token: str | bool | None = None,
) -> Checkpoint:
    """Finds the files of a source and reads all but the tensors' values."""
    with explained(LoadError, f"{source} cannot be read"):
        path = Path(source).expanduser()
        if not path.exists():
            path = _from_hub(str(source), revision, cache_dir, token)
        return _read(path, str(source))


def _read(path: Path, where: str) -> Checkpoint:
    """What is in a folder or file."""
    file = _weights_in(path) if path.is_dir() else path
    contents = read_shards(file) if file.name.endswith(".index.json") else read_file(file)
    # A file by a name of its own may lie beside a config.json that is about another.
    configs = CONFIGS if path.is_dir() or file.name in KNOWN_FILES else ()
    config, processor = (
        read_json(file.parent / name) if name in configs and (file.parent / name).is_file() else {}
        for name in CONFIGS
    )
    return Checkpoint(where, file, *contents, config=config, processor=processor)


def _weights_in(folder: Path) -> Path:
    """The one file of weights in a folder; of a run's folder that of its best model, or of its last yet."""
    for name in KNOWN_FILES:
        if (folder / name).is_file():
            return folder / name
    for name in MODELS:
        if (folder / name).is_dir():
            return _weights_in(folder / name)
    others = sorted(file for file in folder.iterdir() if file.name.endswith(ENDINGS))
    if len(others) == 1:
        return others[0]
    if others:
        names = ", ".join(file.name for file in others)
        raise LoadError(f"{folder} holds several files of weights: {names}; name one of them")
    raise LoadError(
        f"{folder} holds no weights; expected {', '.join(KNOWN_FILES)}, or one file that ends in "
        f"{', '.join(ENDINGS)}"
    )


def _from_hub(
    source: str,
    revision: str | None,
    cache_dir: str | os.PathLike[str] | None,
    token: str | bool | None,
) -> Path:
    """The folder of a hub id's files; of a model's name, which has no weights, the error says so."""
    likely = _likely_name(source)
    if likely == source.lower():
        raise LoadError(
            f"{source!r} is the name of a model, without weights: vitrail.create({source!r}) makes it "
            f"with random ones. {EXPECTED}"
        )
    hint = (
        f". If you mean the model {likely!r}, without weights: vitrail.create({likely!r})" if likely else ""
    )
    match = HUB_ID.fullmatch(source)
    if match is None:
        raise LoadError(f"{source} does not exist. {EXPECTED}{hint}")
    try:
        return _downloaded(match["id"], match["revision"] or revision, cache_dir, token)
    except LoadError as error:
        raise LoadError(f"{error}{hint}") from error.__cause__


def _likely_name(source: str) -> str | None:
    """The paper's name of a model that looks like what was given: vit_base_patch16_224 is vit-b/16."""
    text = re.sub(r"[-_]?patch(\d+).*", r"/\1", source.lower()).replace("_", "-")
    for word, letter in SIZES_IN_WORDS.items():
        text = re.sub(rf"\b{word}\b", letter, text)
    if re.fullmatch(r".+/\d+", text) and text.rpartition("/")[0] in TABLE:  # any patch size will do
        return text
    return next(iter(get_close_matches(text, names(), n=1, cutoff=0.8)), None)


def _downloaded(
    name: str,
    revision: str | None,
    cache_dir: str | os.PathLike[str] | None,
    token: str | bool | None,
) -> Path:
    """The folder of the hub's files in its cache: of the weights, the best that it has and no others."""
    # Here, because it takes longer to import than most models to load.
    from huggingface_hub import errors, snapshot_download

    def fetch(patterns: Iterable[str]) -> Path:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                cache_dir=None if cache_dir is None else Path(cache_dir),
                token=token,
                allow_patterns=[*CONFIGS, *patterns],
            )
        )

    try:
        for file, pieces in KNOWN_FILES.items():
            folder = fetch([file, *pieces])
            if (folder / file).is_file():
                return folder
        return fetch(["*.npz", "*.pth"])
    except (errors.HFValidationError, OSError) as error:
        at = f" at revision {revision}" if revision else ""
        raise LoadError(
            f"{name} is no folder or file here, and could not be had from the hub{at}: {_why(error)}"
        ) from error


def _why(error: Exception) -> str:
    """What the hub's client says, in plain words."""
    from huggingface_hub import errors

    short = re.sub(r"^\[Errno -?\d+\] ", "", str(error.__cause__ or error).strip().partition("\n")[0])
    offline = "HF_HUB_OFFLINE is set" if os.environ.get("HF_HUB_OFFLINE") else ""
    words = {
        errors.GatedRepoError: "its owner wants to be asked on its page first; then say token=…",
        errors.RepositoryNotFoundError: "it has none of that name, or a private one (then say token=…)",
        errors.RevisionNotFoundError: "there is no such revision",
        errors.LocalEntryNotFoundError: f"{offline or f'it cannot be reached ({short})'}, and nothing was "
        "downloaded before",
    }
    return next((text for kind, text in words.items() if isinstance(error, kind)), short)
