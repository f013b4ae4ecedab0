"""Labelled pictures from wherever they are, sorted into training, validation and test."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.data.readers import KINDS, NAMED
from vitrail.data.readers.found import Found, Rows, read_file
from vitrail.words import unknown


@dataclass(frozen=True)
class Pictures:
    """The pictures of one split, in a fixed order.

    items: what `read` takes, one for each picture: a path, a place in an archive, an array's row.
    names: what a person calls each.
    labels: (pictures,), each the number of a class; -1 where it is not known.
    classes: the names of the classes.
    read: gives the bytes of an item's file, or its pixels as `open_picture` takes them.
    """

    items: Any
    names: Sequence[str]
    labels: Tensor
    classes: tuple[str, ...]
    read: Callable[[Any], Any]

    def __len__(self) -> int:
        return len(self.names)

    def data(self, index: int) -> Any:
        """What `open_picture` takes, for one picture."""
        return self.read(self.items[index])

    def select(self, indices: Tensor) -> Pictures:
        """Only these pictures, in this order."""
        rows = indices.tolist()
        return replace(
            self,
            items=self.items[rows] if isinstance(self.items, np.ndarray) else [self.items[i] for i in rows],
            names=[self.names[i] for i in rows],
            labels=self.labels[indices],
        )


@dataclass(frozen=True)
class Dataset:
    """What was found at a place: pictures by split ("train", "val", "test"), and what to know of them."""

    place: str
    kind: str
    classes: tuple[str, ...]
    splits: dict[str, Pictures]
    notes: tuple[str, ...]


def open_source(place: str | os.PathLike[str], *, classes: Sequence[str] = ()) -> Dataset:
    """The labelled pictures at a path, or those that come by name ("digits"); nothing is decoded yet.

    What comes without splits is all called "train". classes: the names to number the labels by, such
    as those of a trained model; by default those that are found.
    """
    path = Path(place)
    passed: list[str] = []
    named = NAMED.get(os.fspath(place))
    for kind in [named] if named else KINDS:
        if kind.fits(path):
            found = kind.read(path)
            if any(label is not None for rows in found.splits.values() for label in rows.labels):
                break
            passed += found.notes or [f"read as {kind.what}, {place} holds no labelled pictures"]
    else:
        raise ValueError(_unrecognised(path, passed))
    names, notes = _classes(found, classes)
    splits = {split: _pictures(rows, names, found.read) for split, rows in found.splits.items()}
    for split, pictures in splits.items():
        unlabelled = len(found.splits[split].items) - len(pictures)
        if unlabelled:
            notes.append(f"{unlabelled:,} pictures of {split} have no label and are left out")
    splits = {split: splits[split] for split in ("train", "val", "test") if len(splits.get(split, ()))}
    return Dataset(str(place), kind.what, names, splits, (*passed, *found.notes, *notes))


def from_files(paths: Sequence[str | os.PathLike[str]]) -> Pictures:
    """Pictures of which no label is known."""
    names = [os.fspath(path) for path in paths]
    return Pictures(names, names, torch.full((len(names),), -1), (), read_file)


def complete(dataset: Dataset, *, seed: int = 0, shares: Mapping[str, float] | None = None) -> Dataset:
    """The same with the splits it lacks, cut from its training pictures: by default a tenth for each.

    Every class gives its share as nearly as whole pictures allow, and keeps one at least for training.
    A split that would get no picture at all is refused. shares: split → part of the training pictures,
    for those splits only that are wanted.
    """
    shares = {"val": 0.1, "test": 0.1} if shares is None else shares
    wanted = {split: share for split, share in shares.items() if split not in dataset.splits}
    if not wanted:
        return dataset
    if min(wanted.values()) <= 0 or sum(wanted.values()) >= 1:
        parts = " and ".join(f"{share:g} for {split}" for split, share in wanted.items())
        raise ValueError(f"{parts} of the training pictures are asked for; expected parts that leave a rest")
    if "train" not in dataset.splits:
        raise ValueError(f"{dataset.place} has no training pictures, only {', '.join(dataset.splits)}")
    train = dataset.splits["train"]
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))
    sizes = torch.bincount(train.labels, minlength=len(train.classes)).tolist()
    # by class: what is not given away yet, in random order
    rest = order[train.labels[order].argsort(stable=True)].split(sizes)
    splits = {}
    for split, share in wanted.items():
        counts = _quotas(sizes, share, [max(len(of_class) - 1, 0) for of_class in rest])
        given = torch.cat([of_class[:count] for of_class, count in zip(rest, counts, strict=True)])
        if not len(given):
            raise ValueError(
                f"{dataset.place} has {len(train):,} training pictures of {len(rest):,} classes, too few to "
                f"keep {share:.3g} of them apart; {math.ceil(1 / min(wanted.values())):,} of each would do"
            )
        rest = [of_class[count:] for of_class, count in zip(rest, counts, strict=True)]
        splits[split] = train.select(given.sort().values)
    splits = {**dataset.splits, **splits, "train": train.select(torch.cat(rest).sort().values)}
    cut = ", ".join(f"{len(splits[split]):,} for {split}" for split in wanted)
    note = f"of {len(train):,} training pictures {cut} are kept apart, class by class (seed {seed})"
    return replace(dataset, splits=splits, notes=(*dataset.notes, note))


def _quotas(counts: Sequence[int], share: float, most: Sequence[int]) -> list[int]:
    """Of each count its share in whole numbers, but no more than there is left to give.

    In sum they are the share of the sum: where there is room, the largest remainders win.
    """
    exact = [count * share for count in counts]
    whole = [int(quota) for quota in exact]
    quotas = [min(quota, limit) for quota, limit in zip(whole, most, strict=True)]
    roomy = [i for i in range(len(exact)) if quotas[i] < min(exact[i], most[i])]
    by_remainder = sorted(roomy, key=lambda i: whole[i] - exact[i])
    for i in by_remainder[: round(sum(exact)) - sum(whole)]:
        quotas[i] += 1
    return quotas


def _classes(found: Found, wanted: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """The names of the classes in order, and what to know of them."""
    counts = Counter(label for rows in found.splits.values() for label in rows.labels if label is not None)
    if wanted:
        times = Counter(wanted)
        for label in counts:
            if label not in times:
                raise ValueError(unknown("class", label, wanted))
            if times[label] > 1:
                raise ValueError(
                    f"{times[label]} classes are called {label!r}, so its pictures may be of any of them; "
                    "give each class a name of its own, or leave these pictures out"
                )
        return tuple(wanted), []
    known = tuple(dict.fromkeys((*found.classes, *sorted(counts, key=_numbers_first))))
    notes = [f"class {name!r} has no pictures and is left out" for name in known if not counts[name]]
    return tuple(name for name in known if counts[name]), notes


def _numbers_first(name: str) -> tuple[bool, int, str]:
    """Sorts "2" before "10", and both before "a"."""
    return (False, int(name), name) if name.isdecimal() else (True, 0, name)


def _pictures(rows: Rows, classes: tuple[str, ...], read: Callable[[Any], Any]) -> Pictures:
    numbers: dict[str | None, int] = {name: number for number, name in enumerate(classes)}
    labels = torch.tensor([numbers.get(label, -1) for label in rows.labels], dtype=torch.long)
    every = Pictures(rows.items, rows.names, labels, classes, read)
    return every if (labels >= 0).all() else every.select((labels >= 0).nonzero()[:, 0])


def _unrecognised(path: Path, passed: Sequence[str]) -> str:
    known = [f"  - {kind.what}" for kind in (*KINDS, *NAMED.values())]
    return "\n".join([*(passed or [_seen(path)]), "Expected one of:", *known])


def _seen(path: Path) -> str:
    if not path.exists():
        return f"{path} does not exist."
    if path.is_file():
        return f"{path} is a file of a kind that holds no labelled pictures."
    entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
    folders = [entry.name for entry in entries if entry.is_dir()]
    endings = Counter(entry.suffix.lower() or "no ending" for entry in entries if entry.is_file())
    held = [f"{count:,} files with {ending}" for ending, count in endings.most_common(5)]
    if folders:
        held.append(f"{len(folders)} folders ({', '.join(folders[:5])})")
    return f"{path} holds {' and '.join(held) or 'nothing'}."
