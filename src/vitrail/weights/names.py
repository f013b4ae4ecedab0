"""Names of tensors, ours and another library's, with strict accounting.

A table has a row for each kind of tensor, ours → theirs:

    "blocks.{}.mlp_norm.*": "blocks.{}.norm2.*"                        {} is a number, * is the rest
    "blocks.{}.attention.(query|key|value).*": "blocks.{}.attn.qkv.*"  these of ours, one after the other
    "patches.stem.stages.{}.*": "block{+1}.*"                          they count from one
    "head.weight": ("head/kernel", KERNEL)                             laid out otherwise: a Form

It is read both ways. Which tensors there are is our model's to say; the table only knows names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.weights.errors import LoadError, SaveError, some
from vitrail.weights.files import Stored


class Form(NamedTuple):
    """How one tensor of theirs holds one or several of ours."""

    join: Callable[[Sequence[Tensor]], Tensor]
    split: Callable[[Tensor, Sequence[torch.Size]], Sequence[Tensor]]


def _split(tensor: Tensor, shapes: Sequence[torch.Size]) -> Sequence[Tensor]:
    return tensor.split([shape[0] for shape in shapes]) if len(shapes) > 1 else [tensor]


PLAIN = Form(join=lambda parts: torch.cat(list(parts)) if len(parts) > 1 else parts[0], split=_split)

Table = Mapping[str, "str | tuple[str, Form]"]


class Place(NamedTuple):
    """One tensor of theirs, and those of ours that it holds, in this order."""

    theirs: str
    form: Form
    ours: tuple[str, ...]


def places(table: Table, names: Iterable[str], library: str) -> list[Place]:
    """Where each of our tensors is in the other library."""
    rows = [
        (_pattern(ours), _parts(ours), *((theirs, PLAIN) if isinstance(theirs, str) else theirs))
        for ours, theirs in table.items()
    ]
    found: dict[str, tuple[Form, dict[int, str]]] = {}
    homeless = []
    for name in names:
        for pattern, parts, theirs, form in rows:
            if match := pattern.fullmatch(name):
                _, held = found.setdefault(_fill(theirs, match), (form, {}))
                held[parts.index(match.groupdict().get("part", ""))] = name
                break
        else:
            homeless.append(name)
    if homeless:
        raise SaveError(f"{library} has no place for {some(homeless)}")
    return [
        Place(theirs, form, tuple(name for _, name in sorted(held.items())))
        for theirs, (form, held) in found.items()
    ]


def _pattern(ours: str) -> re.Pattern[str]:
    signs = {r"\{\}": r"(\d+)", r"\*": "(?P<rest>.+)", r"\(": "(?P<part>", r"\|": "|", r"\)": ")"}
    text = re.escape(ours)
    for sign, expression in signs.items():
        text = text.replace(sign, expression)
    return re.compile(text)


def _parts(ours: str) -> list[str]:
    joined = re.search(r"\((.+)\)", ours)
    return joined[1].split("|") if joined else [""]


def _fill(theirs: str, match: re.Match[str]) -> str:
    named = match.re.groupindex.values()
    numbers = (int(text) for at, text in enumerate(match.groups(), 1) if at not in named)
    name = re.sub(r"\{(\+1)?\}", lambda sign: str(next(numbers) + bool(sign[1])), theirs)
    return name.replace("*", match.groupdict().get("rest", ""))


def theirs_from_ours(places: Iterable[Place], ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The other library's tensors, by their names."""
    return {place.theirs: place.form.join([ours[name] for name in place.ours]) for place in places}


def ours_from_theirs(
    places: Iterable[Place],
    ours: Mapping[str, Tensor],
    theirs: Mapping[str, Stored],
    *,
    unused: Collection[str],
    where: str,
) -> dict[str, Tensor]:
    """Our tensors, read from theirs and independent of the file, when every single one fits.

    ours: tensors of the shapes to have, without data. unused: what may be there and is left out.
    """
    places = list(places)
    wanted = theirs_from_ours(places, ours)
    _account(
        {name: tensor.shape for name, tensor in wanted.items()},
        {name: stored.shape for name, stored in theirs.items() if name not in unused},
        where,
    )
    for name, tensor in wanted.items():
        if theirs[name].dtype.is_floating_point != tensor.is_floating_point():
            raise LoadError(f"{where}: {name} holds {theirs[name].dtype}; expected {tensor.dtype}")
    tensors = {}
    for place in places:
        shapes = [ours[name].shape for name in place.ours]
        parts = place.form.split(theirs[place.theirs].read(), shapes)
        for name, part in zip(place.ours, parts, strict=True):
            tensors[name] = part.clone(memory_format=torch.contiguous_format)
    return tensors


def differences(wanted: Mapping[str, torch.Size], found: Mapping[str, torch.Size]) -> str:
    """A line for each kind of tensor that is not in both by the same name and shape; none if all are."""
    problems = {
        "missing": [name for name in wanted if name not in found],
        "unexpected": [name for name in found if name not in wanted],
        "of another shape": [
            f"{name} {tuple(found[name])} instead of {tuple(shape)}"
            for name, shape in wanted.items()
            if name in found and found[name] != shape
        ],
    }
    return "".join(f"\n  {len(names)} {kind}: {some(names)}" for kind, names in problems.items() if names)


def _account(wanted: Mapping[str, torch.Size], found: Mapping[str, torch.Size], where: str) -> None:
    """Refuses unless both have the same names, with the same shapes."""
    if told := differences(wanted, found):
        raise LoadError(
            f"{where}: of {len(wanted)} tensors that its configuration asks for, not all fit "
            f"({len(found)} in the file), so nothing was loaded{told}\n"
            "  Are the weights and the configuration from the same model? For another number of "
            "classes, load it as it is and say classes=…"
        )
