"""Saving in our own form, and converting to any other."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.models.base import Model
from vitrail.weights import native
from vitrail.weights.adapter import refuse_unsaid, settled
from vitrail.weights.checkpoint import open_checkpoint
from vitrail.weights.errors import LoadError, SaveError
from vitrail.weights.files import read_json
from vitrail.weights.forms import FORMS
from vitrail.weights.loading import draft_of, load, tensors_of
from vitrail.weights.writing import CONFIG, WEIGHTS, replacing


def save(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Writes a model with preprocessing and labels to a folder that `load` reads.

    Compiled and distributed models are saved as what they wrap. Nothing half-written is ever left: what
    the folder held before stays until all is on the disk. A folder of anything but a saved model is
    refused.
    """
    target = Path(folder).expanduser().resolve()
    _refuse_other_contents(target)
    plain = _unwrapped(model)
    with replacing(target, folder=True) as place:
        native.write(plain, place)


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: str = "vitrail",
    **options: Any,
) -> None:
    """Reads weights of any form and writes them in another, to a new folder (or file: torchvision, npz).

    What was written is read back and compared: every tensor bit for bit, configuration,
    preprocessing and labels. What the other form cannot say is refused by name, never dropped.
    options: as for `load`, such as norm_eps=1e-6 where the other form knows only that.
    """
    if to not in FORMS:
        raise ValueError(f"to={to!r} is no form of weights; choose from {', '.join(FORMS)}")
    goal = Path(target).expanduser().resolve()
    if goal.is_file() or (goal.is_dir() and any(goal.iterdir())):
        raise SaveError(f"{target} exists already; remove it, or choose another place")
    if goal.is_dir() and not FORMS[to].folder:
        raise SaveError(f"{target} is a folder; {to} is a single file, so give its name")
    model = load(source, **options)
    with replacing(goal, folder=FORMS[to].folder) as place:
        try:
            FORMS[to].write(model, place)
            _compare(model, place, to)
        except LoadError as error:
            raise SaveError(f"{to} cannot say this: {error}") from error


def _compare(model: Model, place: Path, to: str) -> None:
    """What was written says the same as the model, or an error."""
    draft = draft_of(open_checkpoint(place), {})
    refuse_unsaid(to, settled(model.config), settled(draft.config))
    refuse_unsaid(to, model.preprocess, draft.preprocess)
    if draft.labels != model.labels:
        raise SaveError(f"{to} cannot say these labels: {', '.join(model.labels[:5])}, …")
    back = tensors_of(draft, to)
    changed = [name for name, tensor in model.state_dict().items() if not _same(tensor, back[name])]
    if changed:
        raise SaveError(f"{to} cannot hold {', '.join(changed[:5])} exactly")


def _same(one: Tensor, other: Tensor) -> bool:
    """Bit for bit, so that what is not a number equals itself."""
    return one.dtype == other.dtype and torch.equal(
        one.cpu().contiguous().flatten().view(torch.uint8),
        other.contiguous().flatten().view(torch.uint8),
    )


def _unwrapped(model: nn.Module) -> Model:
    """The model inside of torch.compile and DistributedDataParallel."""
    inner: Any = model
    while not isinstance(inner, Model):
        wrapped = getattr(inner, "_orig_mod", None)
        inner = getattr(inner, "module", None) if wrapped is None else wrapped
        if inner is None:
            raise SaveError(
                f"{type(model).__name__} is no model of Vitrail; expected what vitrail.create or "
                "vitrail.load gave, compiled or wrapped as it may be"
            )
    return inner


def _refuse_other_contents(folder: Path) -> None:
    if folder.is_file():
        raise SaveError(f"{folder} is a file; expected a folder to write {CONFIG} and {WEIGHTS} to")
    if not folder.is_dir():
        return
    names = {file.name for file in folder.iterdir()}
    if names and (names - {CONFIG, WEIGHTS} or not _is_ours(folder / CONFIG)):
        raise SaveError(
            f"{folder} holds something else than a saved model ({', '.join(sorted(names)[:5])}); "
            "choose another folder"
        )


def _is_ours(config: Path) -> bool:
    try:
        return read_json(config).get("format") == native.FORMAT
    except (LoadError, OSError):
        return False
