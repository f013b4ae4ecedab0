"""Files, written so that nobody ever finds half of one."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
PROCESSOR = "preprocessor_config.json"
MODELS = ("best", "last")  # folders of weights in the folder of a run


@contextmanager
def replacing(target: Path, *, folder: bool) -> Iterator[Path]:
    """A place to write to, which becomes the target at the end, or vanishes if anything fails.

    An existing folder is set aside for the moment between two renames, never written into.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    workshop = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    new, old = workshop / "new", workshop / "old"
    try:
        if folder:
            new.mkdir()
        yield new
        usual = workshop / "usual"
        usual.touch()
        for file in new.iterdir() if folder else [new]:
            file.chmod(usual.stat().st_mode)  # safetensors lets only the owner read its files
            _flush(file)
        try:
            if folder and target.exists():
                target.rename(old)
            new.replace(target)
        except BaseException:
            if old.exists() and not target.exists():
                old.rename(target)
            raise
    finally:
        shutil.rmtree(workshop, ignore_errors=True)


def _flush(file: Path) -> None:
    """To the disk, before the file gets the name that others look for."""
    with file.open("rb+") as handle:
        os.fsync(handle.fileno())


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """As people like to read it."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file, as transformers wants it; tensors that share memory are kept apart."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != tensor.nbytes:
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
        apart[name] = tensor
    save_file(apart, path, metadata={"format": "pt"})
