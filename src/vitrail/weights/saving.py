"""Saving in our own form, and converting to any other."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.models.base import Model
from vitrail.models.registry import SYSTEMS
from vitrail.weights import native
from vitrail.weights.adapter import canonical, refuse_changed
from vitrail.weights.checkpoint import ENDINGS, open_checkpoint
from vitrail.weights.errors import LoadError, SaveError, explained
from vitrail.weights.files import plain_name, read_json
from vitrail.weights.forms import FORMS
from vitrail.weights.loading import FLOATS, HEADS, draft_of, load, tensors_of
from vitrail.weights.names import differences
from vitrail.weights.writing import CONFIG, WEIGHTS, replacing


def save(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Writes a model with preprocessing and labels to a folder that `load` reads.

    Compiled and distributed models are saved as what they wrap. Nothing half-written is ever left: what
    the folder held before stays until all is on the disk. A folder of anything but a saved model is
    refused, and so is a model that is no longer what its config says: `load` could not build it.
    """
    plain = _unwrapped(model)
    _refuse_unloadable(plain)
    with explained(SaveError, f"{folder} cannot be written"):
        target = Path(folder).expanduser().resolve()
        _refuse_no_folder(target)
        _refuse_other_contents(target)
        with replacing(target, folder=True) as place:
            native.write(plain, place)


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: str = "vitrail",
    **options: Any,
) -> dict[str, int]:
    """Reads weights of any form and writes them in another, to a new folder (or file: torchvision, npz).

    Returns the names of the files that were written, with their sizes in bytes.

    What was written is read back and compared: every tensor bit for bit, configuration,
    preprocessing and labels. What the other form cannot say is refused by name, never dropped.
    options: as for `load`, such as norm_eps=1e-6 where the other form knows only that.
    """
    if to not in FORMS:
        raise ValueError(f"to={to!r} is no form of weights; choose from {', '.join(FORMS)}")
    form = FORMS[to]
    with explained(SaveError, f"{target} cannot be written"):
        goal = Path(target).expanduser().resolve()
        _refuse_target(goal, to)
    model = load(source, **options)
    with explained(SaveError, f"{target} cannot be written"):
        with replacing(goal, folder=form.folder) as place:
            try:
                form.write(model, place)
                _compare(model, place, to)
            except LoadError as error:
                raise SaveError(f"{to} cannot say this: {error}") from error
        return {
            file.name: file.stat().st_size for file in (sorted(goal.iterdir()) if form.folder else [goal])
        }


def _refuse_target(goal: Path, to: str) -> None:
    """A place that is taken, or whose name says another form."""
    endings = FORMS[to].endings
    if goal.is_file() or (goal.is_dir() and any(goal.iterdir())):
        raise SaveError(f"{goal} exists already; remove it, or choose another place")
    if goal.is_dir() and endings:
        raise SaveError(f"{goal} is a folder; {to} is a single file, so give its name")
    if endings and not goal.name.lower().endswith(endings):
        raise SaveError(f"{goal.name} is no name for {to}, a file that ends in {' or '.join(endings)}")
    if not endings and goal.name.lower().endswith(ENDINGS):
        raise SaveError(f"{goal.name} is the name of a file, and {to} is a folder: leave out {goal.suffix}")
    _refuse_no_folder(goal)


def _refuse_no_folder(goal: Path) -> None:
    """A place in which nothing can be made, as far as can be known without trying."""
    parent = next(parent for parent in goal.parents if parent.exists())
    if not parent.is_dir():
        raise SaveError(f"{goal} cannot be written: {parent} is a file, not a folder")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise SaveError(f"{goal} cannot be written: this user has no permission to write in {parent}")


def _compare(model: Model, place: Path, to: str) -> None:
    """What was written says the same as the model, or an error."""
    draft = draft_of(replace(open_checkpoint(place), where="what was written"), {})
    refuse_changed(to, canonical(model.config), canonical(draft.config))
    refuse_changed(to, model.preprocess, draft.preprocess)
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


def _refuse_unloadable(model: Model) -> None:
    """What `load` would refuse: tensors and labels that are not those of the config."""
    name, classes = type(model).__name__, model.config.classes
    if type(model) not in {kind for kind, _ in SYSTEMS.values()}:
        raise SaveError(f"{name} is a class that load does not know; keep it with torch.save(….state_dict())")
    if model.labels and len(model.labels) != classes:
        raise SaveError(
            f"model.labels has {len(model.labels)} names, but model.config says {classes} classes; expected "
            "a label for each class, or none: model.labels = ()"
        )
    with torch.device("meta"):
        wanted = {
            name: part.shape
            for name, part in type(model)(model.config, model.preprocess).state_dict().items()
        }
    state = {plain_name(name): part for name, part in model.state_dict().items()}
    found = {name: part.shape for name, part in state.items()}
    for head in (f"{head}weight" for head in HEADS):
        if len(found.get(head, ())) == 2 and found[head][0] != classes:
            raise SaveError(
                f"{head} is {tuple(found[head])}, but model.config says {classes} classes; load with "
                f"classes={found[head][0]} instead of replacing the head"
            )
    if told := differences(wanted, found):
        raise SaveError(
            f"the tensors of this {name} are not those that model.config asks for, so load could not build "
            f"it{told}\n  Create or load it with other fields of the config instead of replacing its parts "
            "(classes=0 for no head), or keep torch.save(model.state_dict(), file)"
        )
    odd = [
        f"{name} holds {part.dtype}"
        for name, part in state.items()
        if part.is_floating_point() and part.dtype not in FLOATS.values()
    ]
    if odd:
        raise SaveError(f"{odd[0]}; expected 16, 32 or 64 bits: model.to(torch.bfloat16)")


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
