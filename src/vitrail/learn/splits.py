"""The pictures of a run: in which splits, whether they are still the same, and who has learned from which."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from vitrail.data.checks import Findings
from vitrail.data.readers.found import readable
from vitrail.data.sources import Dataset, complete, open_source
from vitrail.learn.recipe import Recipe, layered, read, same_place
from vitrail.learn.state import RECIPE, Data, read_data

LISTED = 5  # classes whose pictures came or went, in the text


def dataset_of(recipe: Recipe) -> Dataset:
    """The pictures of a recipe, in the splits that it makes of them."""
    shares = {"val": recipe.validation, "test": recipe.test}
    wanted = {split: share for split, share in shares.items() if share}
    dataset = open_source(recipe.data)
    if "train" not in dataset.splits:
        raise ValueError(f"{dataset.place} has no training pictures, only {' and '.join(dataset.splits)}")
    return complete(dataset, seed=recipe.seed, shares=wanted)


def names_of(dataset: Dataset, split: str) -> list[str]:
    """What the pictures of a split are called, without the folder that all are in: it may be moved."""
    place = Path(dataset.place)
    folder = str(place if place.is_dir() else place.parent)
    short, full = (readable(start) + os.sep for start in (folder, os.path.abspath(folder)))
    return [name.removeprefix(short).removeprefix(full) for name in dataset.splits[split].names]


def data_of(dataset: Dataset, findings: Findings, notes: Sequence[str]) -> Data:
    """What a run is begun with. notes: besides those of both."""
    names = {split: names_of(dataset, split) for split in dataset.splits}
    bad = {
        split: {names[split][index]: why for index, why in of_split.items()}
        for split, of_split in findings.bad.items()
    }
    return Data(_digests(dataset), _counts(dataset), bad, (*dataset.notes, *notes, *findings.notes))


def left_out(dataset: Dataset, data: Data) -> dict[str, list[int]]:
    """Split → numbers of the pictures that a run does without."""
    return {
        split: [number for number, name in enumerate(names_of(dataset, split)) if name in data.bad[split]]
        for split in dataset.splits
    }


def refuse_changed(dataset: Dataset, data: Data, run: Path, splits: Iterable[str]) -> None:
    """Other pictures are shared out anew, and a run would be judged by some that it has learned from.

    splits: in which they have to be the same.
    """
    digests = _digests(dataset)
    if all(digests.get(split) == data.digests.get(split) for split in splits):
        return
    now = _counts(dataset)
    changes = []
    for split in dict.fromkeys((*data.counts, *now)):
        ours, theirs = now.get(split, {}), data.counts.get(split, {})
        changes += [
            f"{split} has {ours.get(name, 0):,} pictures of {name}, not {theirs.get(name, 0):,}"
            for name in dict.fromkeys((*theirs, *ours))
            if ours.get(name) != theirs.get(name)
        ]
    if len(changes) > LISTED:
        changes[LISTED:] = [f"and {len(changes) - LISTED:,} more"]
    raise ValueError(
        f"{dataset.place} does not give the pictures that {run} was begun with: "
        f"{'; '.join(changes) or 'as many of each class, but by other names or in another order'}. Which of "
        "them it has learned from can no longer be told. Restore them, or begin a new run, perhaps with "
        f"--from {run}"
    )


def refuse_other_bad(dataset: Dataset, data: Data, split: str, bad: Collection[int]) -> None:
    """A run is judged by all that it kept apart and could read. bad: numbers of what cannot be read now."""
    names = names_of(dataset, split)
    if changed := {names[number] for number in bad} ^ data.bad[split].keys():
        raise ValueError(
            f"{dataset.place}: not the same pictures of {split} can be read as when the run was begun, such "
            f"as {min(changed)} ({len(changed):,} in all); restore them as they were, or begin a new run"
        )


def run_of(source: str) -> tuple[Path, Recipe] | None:
    """The run folder that weights lie in, or that is named for them; and its recipe."""
    place = Path(source).resolve()  # which an id of a hub would only seem to be
    folders = (place, *place.parents[:2]) if place.exists() else ()
    run = next((folder for folder in folders if (folder / RECIPE).is_file()), None)
    if run is None:
        return None
    try:
        return run, layered(read(run / RECIPE))
    except ValueError as error:
        raise ValueError(
            f"which pictures {run} has learned from cannot be told, as its {RECIPE} is damaged: {error}. "
            "Repair it, or move the weights elsewhere, to use them with pictures that they have never seen"
        ) from error


def opened(source: str, place: str | None, classes: Sequence[str] = ()) -> tuple[Dataset, Data | None]:
    """The pictures to judge weights by; those of their own run in its splits, and with its data.json.

    place, classes: as open_source takes them; no place is that of the run.
    """
    found = run_of(source)
    if found is not None and (place is None or same_place(place, found[1].data)):
        run, recipe = found
        dataset, data = dataset_of(recipe), read_data(run)
        refuse_changed(dataset, data, run, (dataset.splits.keys() | data.digests) - {"train"})
        return dataset, data
    if place is None:
        raise ValueError(f"{source} has no run with pictures of its own; name the pictures to judge it by")
    return open_source(place, classes=classes), None


def learned_before(dataset: Dataset, recipe: Recipe) -> list[str]:
    """Notes of weights that have learned from what is kept apart here."""
    notes = []
    for weights in filter(None, (recipe.start, recipe.teacher)):
        found = run_of(weights)
        if found is None or not same_place(found[1].data, recipe.data):
            continue
        run, theirs = found
        digests: dict[str, str] = {}
        with suppress(ValueError):  # where it cannot be told, it is likely
            digests = read_data(run).digests
        ours = _digests(dataset)
        if any(ours[split] != digests.get(split) for split in ours if split != "train"):
            notes.append(
                f"the score is too good, because {weights} has learned from pictures that are kept apart "
                f"here; with seed={theirs.seed} validation={theirs.validation:g} test={theirs.test:g} the "
                "same are, as long as none come or go"
            )
    return notes


def _digests(dataset: Dataset) -> dict[str, str]:
    digests = {}
    for split, pictures in dataset.splits.items():
        told = json.dumps([pictures.classes, pictures.labels.tolist(), names_of(dataset, split)])
        digests[split] = hashlib.blake2b(told.encode(), digest_size=16).hexdigest()
    return digests


def _counts(dataset: Dataset) -> dict[str, dict[str, int]]:
    counts = {}
    for split, pictures in dataset.splits.items():
        of_class = torch.bincount(pictures.labels, minlength=len(pictures.classes)).tolist()
        counts[split] = dict(zip(pictures.classes, of_class, strict=True))
    return counts
