"""Which model and which pictures a person means, and the figures of the one on the other."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from vitrail.data.batches import Loader, Store
from vitrail.data.sources import Dataset, Pictures, complete, open_source
from vitrail.learn.measure import Figures, answers, measure
from vitrail.learn.processes import Processes, processes
from vitrail.learn.recipe import Recipe, layered, read
from vitrail.learn.report import write_report
from vitrail.learn.state import RECIPE, read_findings
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
    report: Path | None = None,
) -> Figures | None:
    """The figures of a model on labelled pictures; None in all processes but the first.

    source: a run folder, or anything that vitrail.load reads. place: pictures as open_source knows them;
    a run's own unless given, of which those that it kept apart are used. split: which of them, by default
    test, else val, else all. batch: pictures at a time in each process. report: an HTML file to write.
    """
    with processes() as here:
        if report is not None and here.first:
            _refuse_unwritable(report)
        model = load(weights_in(source)).to(here.device)
        what, pictures = labelled(source, model, place, split)
        given = answers(model, once(pictures, model, here, batch=batch, workers=workers), here)
        if not here.first:
            return None
        figures = measure(given, pictures, what)
        if report:
            write_report(report, model, pictures, figures, run=Path(source))
        return figures


def weights_in(place: str) -> str:
    """What vitrail.load reads: of a run folder its best model, or its last before there is a best."""
    folders = (Path(place) / kind for kind in ("best", "last"))
    return next((str(folder) for folder in folders if folder.is_dir()), place)


def dataset_of(recipe: Recipe, classes: tuple[str, ...] = ()) -> Dataset:
    """The pictures of a recipe, in the splits that it makes of them. classes: as open_source takes them."""
    shares = {"val": recipe.validation, "test": recipe.test}
    wanted = {split: share for split, share in shares.items() if share}
    return complete(open_source(recipe.data, classes=classes), seed=recipe.seed, shares=wanted)


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


def labelled(source: str, model: Model, place: str | None, split: str | None) -> tuple[str, Pictures]:
    """The pictures to judge a model by, with its own numbers of classes; and what a person calls them."""
    names = class_names(model, source)
    recipe = _recipe_of(Path(source))
    if place is None and recipe is None:
        raise ValueError(
            f"{source} is no run folder with pictures of its own; name the pictures to judge it by"
        )
    if recipe is not None and (place is None or Path(place).resolve() == Path(recipe.data).resolve()):
        dataset = dataset_of(recipe, names)
        _refuse_changed(dataset, Path(source))
    else:
        assert place is not None
        dataset = open_source(place, classes=names)
    known = [split for split in ("test", "val", "train") if split in dataset.splits]
    if split not in (None, *known):
        raise ValueError(f"{dataset.place}: {unknown('split', split, known)}")
    chosen = split or known[0]
    return f"{chosen} of {dataset.place}", dataset.splits[chosen]


def _recipe_of(run: Path) -> Recipe | None:
    """What a run folder was trained by; None of anything else."""
    try:
        return layered(read(run / RECIPE)) if (run / RECIPE).is_file() else None
    except ValueError as error:
        raise ValueError(
            f"{run} cannot be judged as its {RECIPE} says: {error}. {run / 'best'} can, by pictures that you "
            "name"
        ) from error


def _refuse_unwritable(file: Path) -> None:
    """A place that takes no file, which is better known before the work than after it."""
    folder = next(parent for parent in file.absolute().parents if parent.exists())
    with explained(SaveError, f"{file} cannot be written"):
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        tempfile.TemporaryFile(dir=folder).close()


def _refuse_changed(dataset: Dataset, run: Path) -> None:
    """Pictures that came or went since would be shared out anew, and some learned from would be judged by."""
    findings = read_findings(run)
    for split, of_class in findings.counts.items():
        then = sum(of_class.values()) + len(findings.bad[split])
        now = len(dataset.splits[split])
        if now != then:
            raise ValueError(
                f"{dataset.place} gives {now:,} pictures for {split}, but {then:,} when {run} was trained: "
                "those that it learned from can no longer be told from the others. Restore it, or name "
                "pictures that the run has never seen"
            )
