"""The figures of a model on labelled pictures."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import torch

from vitrail.data.batches import Loader, Store
from vitrail.data.sources import Pictures
from vitrail.learn.measure import Figures, answers, measure
from vitrail.learn.processes import Processes, processes
from vitrail.learn.report import write_report
from vitrail.learn.splits import opened, refuse_other_bad
from vitrail.models import Model
from vitrail.weights import load
from vitrail.weights.errors import SaveError, explained
from vitrail.words import unknown


def evaluate(
    source: str,
    place: str | None = None,
    *,
    split: str | None = None,
    batch: int = 64,
    workers: int | None = None,
    device: str = "auto",
    report: Path | None = None,
) -> Figures | None:
    """The figures of a model on labelled pictures; None in all processes but the first.

    source: a run folder, or anything that vitrail.load reads. place: pictures as open_source knows them;
    a run's own unless given, of which those that it kept apart are used. split: which of them, by default
    test, else val, else all. batch: pictures at a time in each process. device: as processes takes it.
    report: an HTML file to write.
    """
    with processes(device) as here:
        if report is not None and here.first:
            _refuse_unwritable(report)
        model = load(source, dtype=torch.float32).to(here.device)
        dataset, data = opened(source, place, class_names(model, source))
        known = [split for split in ("test", "val", "train") if split in dataset.splits]
        if split not in (None, *known):
            raise ValueError(f"{dataset.place}: {unknown('split', split, known)}")
        chosen = split or known[0]
        pictures = dataset.splits[chosen]
        given = answers(model, once(pictures, model, here, batch=batch, workers=workers), here)
        if data is not None:
            refuse_other_bad(dataset, data, chosen, given.bad)
        if not here.first:
            return None
        what = dataset.place if known == ["train"] else f"{chosen} of {dataset.place}"
        figures = measure(given, pictures, what)
        if report:
            write_report(report, model, pictures, figures, run=Path(source))
        return figures


def once(
    pictures: Pictures, model: Model, here: Processes, *, batch: int, workers: int | None = None
) -> Loader:
    """Each picture once over all processes, as the model wants it and never kept."""
    store = Store(pictures, model.preprocess, exact=True, memory=0)
    return Loader(
        store,
        batch=batch * here.world,
        rank=here.rank,
        world=here.world,
        workers=workers,
        device=here.device,
    )


def class_names(model: Model, source: str) -> tuple[str, ...]:
    """What a model's answers are called: its labels, or numbers where it has none."""
    if not model.config.classes:
        raise ValueError(
            f"{source} gives features, not classes; `vitrail probe` measures what they are worth, or train a "
            f"head with `vitrail train PICTURES --from {source}`"
        )
    return model.labels or tuple(map(str, range(model.config.classes)))


def _refuse_unwritable(file: Path) -> None:
    """A place that takes no file, which is better known before the work than after it."""
    folder = next(parent for parent in file.absolute().parents if parent.exists())
    with explained(SaveError, f"{file} cannot be written"):
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        tempfile.TemporaryFile(dir=folder).close()
