"""What is wrong with labelled pictures, found before anything is trained on them."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch

from vitrail.data.batches import Store, cores, reason
from vitrail.data.pictures import PictureError

FEW = 10  # training pictures, below which a class can hardly be learned
UNEVEN = 10  # times as many pictures in the largest class as in the smallest
LISTED = 20  # pictures that cannot be read, in the text
SHOWN = 3  # names of copies of a picture
CHUNK = 64  # pictures that a thread looks at in one go

Place = tuple[str, int]  # split, number of a picture


@dataclass(frozen=True)
class Findings:
    """What `examine` found.

    counts: split → class → pictures that can be read.
    bad: split → number of a picture → why it cannot be read; such pictures are to be left out.
    notes: all of it for a person, a line or more each.
    """

    counts: dict[str, dict[str, int]]
    bad: dict[str, dict[int, str]]
    notes: tuple[str, ...]


def examine(
    stores: Mapping[str, Store],
    *,
    strict: bool = False,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Findings:
    """Reads and decodes every picture once, which fills the stores, and looks for what misleads training.

    strict: refuse pictures that cannot be read. progress: is told how many pictures are done, of how many.
    """
    every = [(split, index) for split, store in stores.items() for index in range(len(store.pictures))]
    chunks = [every[start : start + CHUNK] for start in range(0, len(every), CHUNK)]
    bad: dict[str, dict[int, str]] = {split: {} for split in stores}
    same: dict[bytes, list[Place]] = defaultdict(list)
    with ThreadPoolExecutor(workers or cores()) as pool:
        done = 0
        for chunk, looks in zip(chunks, pool.map(partial(_look, stores), chunks), strict=True):
            for (split, index), (digest, why) in zip(chunk, looks, strict=True):
                if why:
                    bad[split][index] = why
                else:
                    same[digest].append((split, index))
            done += len(chunk)
            if progress is not None:
                progress(done, len(every))
    counts = {split: _counts(store, bad[split]) for split, store in stores.items()}
    unreadable = _unreadable(stores, bad)
    for split, of_class in counts.items():
        if not any(of_class.values()):
            raise ValueError(f"no picture of {split} is left; {unreadable}")
    if unreadable and strict:
        raise ValueError(f"{unreadable}\nRepair or remove them, or leave them out by not asking to be strict")
    refuse_one_class([*next(iter(counts.values()))])
    copies = [places for places in same.values() if len(places) > 1]
    notes = [f"left out: {unreadable}"] if unreadable else []
    notes += [*_copied(stores, copies), *_greyed(stores), *_unbalanced(counts.get("train", {}))]
    return Findings(counts, bad, tuple(notes))


def refuse_one_class(classes: Sequence[str]) -> None:
    """Nothing can be told from a single class."""
    if len(classes) < 2:
        raise ValueError(f"there is only one class, {', '.join(classes)}; expected two or more")


def _look(stores: Mapping[str, Store], places: Sequence[Place]) -> list[tuple[bytes, str]]:
    """For each picture what tells its content from others, and why it cannot be read, or nothing."""
    looks = []
    for split, index in places:
        store = stores[split]
        digest, why = b"", ""
        try:
            data = store.pictures.data(index)
            digest = hashlib.blake2b(data, digest_size=16).digest()
            if not store.kept[index]:
                store.decode(index, data)
        except (PictureError, OSError) as error:
            why = reason(error)
        looks.append((digest, why))
    return looks


def _counts(store: Store, bad: Collection[int]) -> dict[str, int]:
    labels = store.pictures.labels[[index for index in range(len(store.pictures)) if index not in bad]]
    counts = torch.bincount(labels, minlength=len(store.pictures.classes)).tolist()
    return dict(zip(store.pictures.classes, counts, strict=True))


def _unreadable(stores: Mapping[str, Store], bad: Mapping[str, Mapping[int, str]]) -> str:
    """Every picture that cannot be read, with the reason; nothing if there is none."""
    lines = [
        f"  {stores[split].pictures.names[index]}: {why}"
        for split in bad
        for index, why in bad[split].items()
    ]
    more = [f"  and {len(lines) - LISTED:,} more"] if len(lines) > LISTED else []
    return "\n".join([f"{len(lines):,} pictures cannot be read:", *lines[:LISTED], *more]) if lines else ""


def _copied(stores: Mapping[str, Store], copies: Sequence[Sequence[Place]]) -> list[str]:
    """The same file more than once: in several splits, under several classes, or for nothing."""

    def classes(places: Sequence[Place]) -> set[int]:
        return {int(stores[split].pictures.labels[index]) for split, index in places}

    kinds = {
        "the score is too good, because training pictures are in val or test as well": [
            places for places in copies if len({split for split, _ in places}) > 1
        ],
        "the same picture has different classes": [places for places in copies if len(classes(places)) > 1],
        "the same picture comes more than once": copies,
    }
    return [
        f"{what}: {sum(map(len, found)):,} pictures, such as "
        + " and ".join(stores[split].pictures.names[index] for split, index in found[0][:SHOWN])
        for what, found in kinds.items()
        if found
    ]


def _greyed(stores: Mapping[str, Store]) -> list[str]:
    """Pictures in colour, of which a model of one channel sees none."""
    names = [
        store.pictures.names[index]
        for store in stores.values()
        for index in store.coloured.nonzero()[:, 0].tolist()
    ]
    return [f"seen in grey, but in colour: {len(names):,} pictures, such as {names[0]}"] if names else []


def _unbalanced(counts: Mapping[str, int]) -> list[str]:
    """Classes that have hardly any training pictures, and how uneven they are."""
    notes = []
    few = [f"{name} ({count})" for name, count in counts.items() if count < FEW]
    if few:
        notes.append(f"fewer than {FEW} training pictures: {', '.join(few)}; such classes are hardly learned")
    if counts:
        least, most = (choose(counts, key=counts.__getitem__) for choose in (min, max))
        if counts[most] >= UNEVEN * max(1, counts[least]):
            notes.append(
                f"classes are uneven: {counts[most]:,} training pictures of {most}, {counts[least]:,} of "
                f"{least}; look at the figures of each class, not only at the accuracy"
            )
    return notes
