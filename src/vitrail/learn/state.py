"""The run folder: what is kept, when it counts as kept, and who may write.

    runs/x/
      recipe.toml            everything that decides the run
      data.json              which pictures it learns from, and what was found wrong with them
      metrics.jsonl          a line for each stretch of training and each validation; also in tensorboard/
      last/  best/           models for vitrail.load
      figures.json           what the best is worth on pictures kept apart, at the end; also as report.html
      resume-0.safetensors   the states to go on from, written by turns: the newer that is whole counts
      resume-1.safetensors

A state is one file, so that it is there whole or not at all, and all else is written before it: whatever
is younger than the newest state will be written again, the same.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vitrail.learn.board import write_board
from vitrail.models import Model
from vitrail.weights import native
from vitrail.weights.writing import MODELS, replacing

RECIPE = "recipe.toml"
DATA = "data.json"
METRICS = "metrics.jsonl"
BOARD = "tensorboard"
FIGURES = "figures.json"
REPORT = "report.html"
STATES = ("resume-0.safetensors", "resume-1.safetensors")
OTHERS = (DATA, METRICS, BOARD, *MODELS, FIGURES, REPORT)  # that are there only after a recipe
WORKSHOP = {"new", "old", "usual"}  # what may lie in a folder of weights.writing.replacing
KEY = "vitrail"  # what the facts are called in a state's metadata


class State(NamedTuple):
    """Where a run stands: tensors by name, and facts that JSON can say, `step` among them."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]


class Data(NamedTuple):
    """The pictures of a run, as data.json has them.

    digests: split → what only these pictures have: of their names, order and classes.
    counts: split → class → pictures.
    bad: split → name → why it cannot be read; such pictures are left out.
    notes: what a person should know of them, a line or more each.
    """

    digests: dict[str, str]
    counts: dict[str, dict[str, int]]
    bad: dict[str, dict[str, str]]
    notes: Sequence[str]


class WriteError(OSError):
    """The run folder cannot be written to, as when the disk is full; what was there before is whole."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps every other run out of the folder; the system itself lets go when this process dies.

    Makes the folder, and takes it away again where no run was begun: one that is refused leaves nothing.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    file, owner = folder / ".lock", folder / ".owner"
    lock = FileLock(file)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(
            f"{folder} is being written to by {owner.read_text() if owner.exists() else 'another run'}; "
            "wait for it, end it, or choose another folder with --out"
        ) from None
    except OSError as error:
        raise ValueError(
            f"{folder} cannot be a run folder: {error.strerror}; choose another with --out"
        ) from error
    try:
        with _writing(owner):
            owner.write_text(f"process {os.getpid()} on {platform.node()}")
        if is_run(folder):
            _tidy(folder)
        yield
    finally:
        with suppress(OSError):  # others may have put something there, or taken it away
            owner.unlink()
            if not is_run(folder):
                file.unlink()
                for path in made:
                    path.rmdir()
        lock.release()


def is_run(folder: Path) -> bool:
    """Whether a run was begun in the folder."""
    return any((folder / name).exists() for name in (RECIPE, *STATES))


def _tidy(folder: Path) -> None:
    """Removes what a killed run was in the middle of writing, and puts back what it had set aside."""
    for name in (RECIPE, *OTHERS, *STATES):
        for workshop in folder.glob(f".{name}.*"):
            if not workshop.is_dir() or {path.name for path in workshop.iterdir()} - WORKSHOP:
                continue  # somebody else's
            old, target = workshop / "old", folder / name
            if old.exists() and not target.exists():
                old.rename(target)
            shutil.rmtree(workshop)


@contextmanager
def _writing(what: Path) -> Iterator[None]:
    """Says what a failed write means for the run."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise WriteError(
            f"{what} could not be written: {reason}. The states before it are whole: make room, then go on "
            f"with --resume --out {what.parent}"
        ) from error


def write_text(path: Path, text: str) -> None:
    """A small file, whole or not at all."""
    with _writing(path), replacing(path, folder=False) as new:
        new.write_text(text, encoding="utf-8")


def write_model(model: Model, folder: Path) -> None:
    """last/ or best/: the model for vitrail.load, in the place of the one before."""
    with _writing(folder), replacing(folder, folder=True) as new:
        native.write(model, new)


def write_state(folder: Path, state: State) -> None:
    """In the place of the older of the two states; from here on, this is where --resume begins."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.tensors.items()}
    facts = json.dumps({**state.facts, "checksum": _checksum(tensors)})
    found = [_facts(folder / name) for name in STATES]
    ages = [-1 if facts is None else facts["step"] for facts in found]
    path = folder / STATES[ages.index(min(ages))]
    with _writing(path), replacing(path, folder=False) as new:
        save_file(tensors, new, metadata={KEY: facts})


def read_state(folder: Path) -> State | None:
    """The newest state that is whole, or None where there is none yet. Where none of them is, refuses."""
    candidates = ((_facts(folder / name), folder / name) for name in STATES)
    known = [(facts, path) for facts, path in candidates if facts is not None]
    for facts, path in sorted(known, key=lambda each: each[0]["step"], reverse=True):
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            # Clones: what the file itself holds would forbid Windows to put another in its place.
            tensors = {name: file.get_tensor(name).clone() for name in names}
        if _checksum(tensors) == facts["checksum"]:
            return State(tensors, facts)
    damaged = [name for name in STATES if (folder / name).exists()]
    if damaged:
        models = [str(folder / kind) for kind in ("last", "best") if (folder / kind).is_dir()]
        kept = f"; {' and '.join(models)} can still be loaded" if models else ""
        raise ValueError(
            f"{folder} cannot go on, as all that it would go on from is damaged: {', '.join(damaged)}{kept}. "
            "Begin anew with another --out" + (f", perhaps --from {models[-1]}" if models else "")
        )
    return None


def _facts(path: Path) -> dict[str, Any] | None:
    """What a state says of itself; None where there is none, or only part of one."""
    try:
        with safe_open(path, framework="pt") as file:
            return json.loads(file.metadata()[KEY])
    except (FileNotFoundError, SafetensorError, TypeError, LookupError):
        return None


def _checksum(tensors: Mapping[str, Tensor]) -> int:
    """Of all bytes: a disk that lost power can leave a file of the right length with the wrong content."""
    total = 0
    for name in sorted(tensors):
        total = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, total)
    return total


def read_data(folder: Path) -> Data:
    """data.json of a run."""
    try:
        return Data(**json.loads((folder / DATA).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"which pictures {folder} has learned from cannot be told, as its {DATA} is damaged or gone. "
            "Restore it, or move the weights elsewhere, to use them with pictures that they have never seen"
        ) from error


def write_lines(folder: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Adds lines to the metrics, for good, and to those for TensorBoard."""
    path = folder / METRICS
    with _writing(path), path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())
    with _writing(folder / BOARD):
        write_board(folder / BOARD, lines)


def read_lines(folder: Path, until: int) -> list[dict[str, Any]]:
    """The metrics up to a step; what was written after it, whole or torn, is left out."""
    path = folder / METRICS
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
            early = line["step"] <= until
        except (ValueError, LookupError, TypeError):
            break  # torn: nothing after it can be older than the state
        if early:
            lines.append(line)
    return lines


def rewind(folder: Path, step: int) -> None:
    """Takes the metrics back to a step, so that going on from it doubles nothing."""
    lines = read_lines(folder, step)
    write_text(folder / METRICS, "".join(json.dumps(line) + "\n" for line in lines))
    shutil.rmtree(folder / BOARD, ignore_errors=True)
    with _writing(folder / BOARD):
        write_board(folder / BOARD, lines)
