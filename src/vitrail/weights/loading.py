"""Loading: any form of weights becomes a model, every tensor accounted for."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.models.base import Model
from vitrail.models.config import build_config
from vitrail.models.registry import build
from vitrail.models.vit import SPECIAL_TOKENS, initialise
from vitrail.positions import resize_positions
from vitrail.weights.adapter import Draft
from vitrail.weights.checkpoint import Checkpoint, open_checkpoint
from vitrail.weights.errors import LoadError, LoadWarning, some
from vitrail.weights.forms import FORMS
from vitrail.weights.names import ours_from_theirs, places
from vitrail.words import unknown

HEADS = ("head.", "distillation_head.")
POSITIONS = "positions.table"
FLOATS = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}


def load(
    source: str | os.PathLike[str],
    *,
    classes: int | None = None,
    labels: Sequence[str] | None = None,
    image_size: int | tuple[int, int] | None = None,
    dtype: torch.dtype | str | None = None,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    token: str | bool | None = None,
    **changes: Any,
) -> Model:
    """A model with the weights, preprocessing and labels of a source, ready to predict (in eval mode).

    source: a folder or file written by `save`, transformers or timm, a state dict of timm or
    torchvision, an .npz of the original JAX code, or the hub id of any of these, such as
    "google/vit-base-patch16-224" or "timm/vit_tiny_patch16_224.augreg_in21k@main"; or the folder of a
    run, for its best model.

    Every tensor must fit, or nothing is loaded. What may change, and is then said in a LoadWarning:

    classes, labels: for another number of classes than the file's, the head starts anew. Labels for
        as many classes as there are only name them.
    image_size: learned positions are resized to the new grid.
    positioned_tokens: positions of special tokens, which never change, become part of the tokens, or
        zeros; the answers stay the same.

    changes: other fields of the config, such as drop_path=0.1, where they ask for no other tensors, or
    what a lone file of tensors does not tell (heads=…).
    dtype: of the weights, such as torch.float16 or its name; the widest of those in the file unless given,
    so half stays half.
    revision, cache_dir, token: for the hub. HF_HUB_OFFLINE=1 uses only what has been downloaded.
    """
    given = {"classes": classes, "image_size": image_size}
    asked = {name: value for name, value in given.items() if value is not None} | changes
    if labels is not None:
        if classes not in (None, len(labels)):
            raise ValueError(f"{len(labels)} labels were given for classes={classes}")
        asked["classes"] = len(labels)
    kind = FLOATS.get(str(dtype).removeprefix("torch."))
    if kind is None and dtype is not None:
        raise ValueError(unknown("dtype", dtype, FLOATS))
    checkpoint = open_checkpoint(source, revision=revision, cache_dir=cache_dir, token=token)
    where = checkpoint.where
    draft = draft_of(checkpoint, asked)
    state = tensors_of(draft, where)
    try:
        config = build_config(type(draft.config), {**asdict(draft.config), **asked})
    except ValueError as error:
        raise LoadError(f"{where} cannot be loaded like that: {error}") from None
    model = _skeleton(_changed(draft, config, labels), where)
    state, notes = _fitted(state, model, draft.config, where)
    if draft.spare:
        notes.append(f"{some(draft.spare)} were left out, since they have no part in its answer")
    if draft.guessed:
        notes.append(f"it does not tell everything; assumed {'; '.join(draft.guessed)}")
    kind = kind or reduce(torch.promote_types, {t.dtype for t in state.values() if t.is_floating_point()})
    device = torch.get_default_device()
    placed = {
        name: tensor.to(device, kind if tensor.is_floating_point() else None)
        for name, tensor in state.items()
    }
    model.load_state_dict(placed, assign=True)
    for note in notes:
        warnings.warn(f"{where}: {note}", LoadWarning, stacklevel=2)
    return model.eval()


def draft_of(checkpoint: Checkpoint, asked: Mapping[str, Any]) -> Draft:
    """What a checkpoint is, by the first form that knows it."""
    where = checkpoint.where
    form = next((form for form in FORMS.values() if form.is_one(checkpoint)), None)
    if form is None:
        raise LoadError(
            f"{where} is of no family that can be read: expected a Vision Transformer of Vitrail, "
            f"transformers, timm, torchvision or the original .npz; it has {some(list(checkpoint.tensors))}"
        )
    try:
        return form.read(checkpoint, asked)
    except LoadError:
        raise
    except KeyError as error:
        raise LoadError(f"{where} lacks {error}, so it is not what it is said to be") from error
    except (ArithmeticError, AttributeError, IndexError, TypeError, ValueError) as error:
        # Configurations are written by anyone, and can hold anything.
        raise LoadError(f"{where} has a configuration that makes no sense: {error}") from error


def tensors_of(draft: Draft, where: str) -> dict[str, Tensor]:
    """All tensors that the draft's model has, by our names, when every single one fits."""
    config = draft.config
    if max(config.depth, *config.resnet_units, 0) > len(draft.tensors):
        raise LoadError(
            f"{where}: its configuration says depth={config.depth}, resnet_units="
            f"{config.resnet_units}, but there are only {len(draft.tensors)} tensors"
        )
    kinds = {stored.dtype for stored in draft.tensors.values() if stored.dtype.is_floating_point}
    odd = kinds - set(FLOATS.values())
    if odd:
        raise LoadError(f"{where} holds {odd.pop()}; expected 16, 32 or 64 bits")
    shapes = _skeleton(draft, where).state_dict()
    return ours_from_theirs(
        places(draft.table, shapes, where),
        shapes,
        draft.tensors,
        unused={*draft.unused, *draft.spare},
        where=where,
    )


def _skeleton(draft: Draft, where: str) -> Model:
    """The model without memory for its tensors."""
    try:
        with torch.device("meta"):
            return build(draft.system, draft.config, preprocess=draft.preprocess, labels=draft.labels)
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        raise LoadError(f"{where}: no model can be built as its configuration says: {error}") from error


def _changed(draft: Draft, config: Any, labels: Sequence[str] | None) -> Draft:
    """The draft of what was asked for: labels and preprocessing go along with the config."""
    if labels is None:
        labels = draft.labels if config.classes == draft.config.classes else ()
    preprocess = draft.preprocess
    if preprocess and config.image_size != draft.config.image_size:
        preprocess = preprocess.resized_to(*config.image_size)
    return draft._replace(config=config, preprocess=preprocess, labels=tuple(labels))


def _fitted(
    state: Mapping[str, Tensor], model: Model, stored: Any, where: str
) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors that the model wants: as they are, resized, or new; and what was done."""
    config, wanted, notes = model.config, model.state_dict(), []
    fitted = dict(state)
    same_tokens = POSITIONS in fitted and config.special_tokens == stored.special_tokens
    if same_tokens and config.positioned != stored.positioned:
        fitted |= _repositioned(fitted, math.prod(stored.grid), config.positioned)
        notes.append(
            f"{config.positioned} of the special tokens have positions now instead of {stored.positioned}; "
            "what the others had is part of them, so that the answers stay the same"
        )
    if POSITIONS in wanted and POSITIONS in fitted and config.grid != stored.grid:
        fitted[POSITIONS] = resize_positions(
            fitted[POSITIONS],
            stored.grid,
            config.grid,
            prefix=fitted[POSITIONS].shape[1] - math.prod(stored.grid),
            rule=config.position_resize,
        )
        was, now = ("x".join(map(str, grid)) for grid in (stored.grid, config.grid))
        notes.append(f"learned positions were resized from {was} to {now}")
    if config.classes != stored.classes:
        fitted = {name: tensor for name, tensor in fitted.items() if not name.startswith(HEADS)}
        for name in HEADS:
            head = getattr(model, name.rstrip("."), None)
            if head is not None:
                head = nn.Linear(head.in_features, head.out_features)
                initialise(head)
                fitted |= {f"{name}{part}": tensor for part, tensor in head.state_dict().items()}
        notes.append(
            f"its head for {stored.classes} classes was left out"
            + (f"; the one for {config.classes} is new and knows nothing yet" if config.classes else "")
        )
    unfit = [name for name in wanted if name not in fitted or fitted[name].shape != wanted[name].shape]
    unfit += [name for name in fitted if name not in wanted]
    if unfit:
        raise LoadError(
            f"{where} cannot be loaded with {_difference(stored, config)}: that asks for other tensors "
            f"than it has ({some(unfit)}). Create such a model and train it instead"
        )
    return fitted, notes


def _repositioned(state: Mapping[str, Tensor], patches: int, positioned: int) -> dict[str, Tensor]:
    """Special tokens and positions with the same sums, of which the first `positioned` tokens have one."""
    names = [name for name in SPECIAL_TOKENS if name in state]
    tokens = torch.cat([state[name] for name in names], 1)  # (1, special tokens, width)
    table = state[POSITIONS]  # (1, rows of special tokens + patches, width)
    had = table.shape[1] - patches
    rows = F.pad(table[:, :had], (0, 0, 0, tokens.shape[1] - had))  # zeros for tokens that had none
    tokens = torch.cat([tokens[:, :positioned], (tokens + rows)[:, positioned:]], 1)
    table = torch.cat([rows[:, :positioned], table[:, had:]], 1)
    parts = tokens.split([state[name].shape[1] for name in names], 1)
    return {POSITIONS: table, **{name: part.clone() for name, part in zip(names, parts, strict=True)}}


def _difference(stored: Any, config: Any) -> str:
    return ", ".join(
        f"{name}={value!r}" for name, value in asdict(config).items() if value != getattr(stored, name)
    )
