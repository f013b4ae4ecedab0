"""From a recipe to a finished run folder."""

from __future__ import annotations

import itertools
import json
import shlex
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from vitrail.data.batches import Loader, Store, cores
from vitrail.data.checks import examine, refuse_one_class
from vitrail.data.pictures import PictureError, open_picture
from vitrail.data.preprocess import Preprocess, Sides
from vitrail.data.seeds import mix
from vitrail.data.sources import Dataset, Pictures
from vitrail.learn.fit import fit
from vitrail.learn.learner import begin, from_state, validate
from vitrail.learn.measure import answers, measure, table
from vitrail.learn.objectives import OBJECTIVES, Objective, mix_pairs
from vitrail.learn.optimiser import freeze
from vitrail.learn.pace import Pace, settle
from vitrail.learn.processes import Processes, agreed, processes
from vitrail.learn.progress import clock, ticker, told
from vitrail.learn.recipe import (
    Recipe,
    changes,
    choose,
    from_anywhere,
    layered,
    preset,
    read,
    same_place,
    to_toml,
)
from vitrail.learn.report import write_report
from vitrail.learn.splits import data_of, dataset_of, learned_before, left_out, refuse_changed
from vitrail.learn.state import (
    DATA,
    FIGURES,
    OTHERS,
    RECIPE,
    REPORT,
    STATES,
    Data,
    is_run,
    locked,
    read_data,
    read_state,
    write_model,
    write_text,
)
from vitrail.models import Model, create
from vitrail.weights import load

RUNS = Path("runs")
LOOKED_AT = 32  # pictures whose sizes tell the size of all
LEAST = 20  # steps between validations, where an epoch has fewer
KEPT = 0.95  # of the minutes are planned for: rates come and go
NATIVE = 64  # pictures no larger than this are taken as they are
FIXED = ("data", "start", "seed", "validation", "test")  # what a run cannot change once it has begun
HEADING = "Written by vitrail train, complete. Go on with: vitrail train --resume --out {folder}"


class Setting(NamedTuple):
    """All that a run is made of, ready to go."""

    recipe: Recipe
    dataset: Dataset
    model: Model
    objective: Objective
    loaders: dict[str, Loader]  # by split
    data: Data
    here: Processes

    @property
    def per_epoch(self) -> int:
        """Steps in an epoch: whole batches only."""
        return len(self.loaders["train"])

    @property
    def period(self) -> int:
        """Steps between validations: an epoch, or several short ones."""
        return self.per_epoch * -(-LEAST // self.per_epoch)

    def batches(self, step: int) -> Generator[Any, None, None]:
        """Training batches from a step on, without end; this process's part of each."""
        recipe = self.recipe
        for number, batch in enumerate(self.loaders["train"].stream(step), start=step):
            mixed: Any = batch
            if recipe.mixup or recipe.cutmix:
                mixed = mix_pairs(
                    batch,
                    mix(recipe.seed, number, "mix"),
                    mixup=recipe.mixup,
                    cutmix=recipe.cutmix,
                    rank=self.here.rank,
                    world=self.here.world,
                )
            yield mixed

    def score(self, model: nn.Module, split: str) -> dict[str, float]:
        """Loss and figures of a model on a split."""
        return validate(model, self.objective, self.loaders[split].epoch(0), self.recipe, self.here)


def train(
    source: str | None = None,
    assignments: Sequence[str] = (),
    *,
    start: str | None = None,
    out: Path | None = None,
    resume: bool = False,
    strict: bool = False,
    dry_run: bool = False,
) -> Path | None:
    """Trains, and returns the run folder; None after a dry run.

    source: pictures as open_source knows them, a recipe's .toml, or None for the built-in digits.
    assignments: changes to the recipe, each field=value. start: weights to begin from. out: the run
    folder, by default a new one in runs/. resume: go on in `out`, by default the latest run; with a source,
    begin where there is none yet. strict: refuse bad pictures instead of leaving them out. dry_run: only
    tell what would happen.
    """
    asked = changes(assignments) | ({"start": start} if start else {})
    values: list[dict[str, Any]] = [*_from_source(source), asked]
    notes: list[str] = []
    folder = out or (_latest() if resume else _unused(layered(*values).data))
    if resume and (folder / RECIPE).is_file():
        values, notes = _going_on(folder, source, asked)
    elif resume and source is None:
        raise ValueError(f"{folder} holds no run to go on with (no {RECIPE}); name a run folder with --out")
    else:
        _refuse_taken(folder)
    with processes(layered(*values).device) as here, ExitStack() as stack:
        say: Callable[[str], None] = print if here.first else _silent
        folder = agreed(folder, here)  # the first may be ahead, and have made the one that seemed free
        if here.first:  # at once: what cannot be written to is no use to set up for
            stack.enter_context(locked(folder))
        state = agreed(read_state(folder) if here.first else None, here)
        data = None if state is None else agreed(read_data(folder) if here.first else None, here)
        setting = _set_up(values, here, folder, data, strict=strict)
        for note in setting.data.notes if data is None else notes:
            say(note)
        setting, measured = _settle(setting, dry_run=dry_run)
        recipe, per_epoch = setting.recipe, setting.per_epoch
        steps = max(round(recipe.epochs * per_epoch), 1)
        learner = begin(setting.model, recipe)
        if state is not None:
            from_state(learner, state)
        say(_summary(setting, measured, folder))
        if dry_run:
            return None

        if here.first:
            complete = replace(from_anywhere(recipe), preset="none")
            heading = HEADING.format(folder=shlex.quote(folder.as_posix()))
            write_text(folder / RECIPE, to_toml(complete, heading))
            write_text(folder / DATA, json.dumps(setting.data._asdict(), indent=1) + "\n")
        fit(
            learner,
            setting.objective,
            setting.batches,
            lambda model: setting.score(model, "val"),
            recipe,
            state,
            lambda model, kind: write_model(model, folder / kind),
            steps=steps,
            per_epoch=per_epoch,
            period=setting.period,
            folder=folder,
            here=here,
        )
        say(f"trained for {clock(learner.seconds)}; best validation: {told(learner.best or {})}")
        agreed(None, here)  # nobody reads before the first has written
        _judge(setting, folder, say)
    return folder


def _judge(setting: Setting, folder: Path, say: Callable[[str], None]) -> None:
    """The figures of the best model on pictures that it has not learned from, told and written."""
    best = load(folder / "best").to(setting.here.device)
    split = "test" if "test" in setting.loaders else "val"
    what = f"{split} of {setting.dataset.place}"
    if split == "val":
        what += ", on which the best epoch was chosen"
    given = answers(best, setting.loaders[split], setting.here)
    if not setting.here.first:
        return
    figures = measure(given, setting.dataset.splits[split], what)
    write_text(folder / FIGURES, json.dumps(figures.to_dict(), indent=1) + "\n")
    write_report(folder / REPORT, best, setting.dataset.splits[split], figures, run=folder)
    say(f"\n{table(figures)}\n\nreport     {folder / REPORT}")


def _silent(_: str) -> None:
    """What the processes after the first say."""


def _from_source(source: str | None) -> list[dict[str, Any]]:
    """The values that the first argument stands for."""
    if source is not None and (Path(source) / RECIPE).is_file():
        raise ValueError(
            f"{source} is a run, not pictures; go on with it by --resume --out {source}, or begin from its "
            f"weights by --from {source}"
        )
    if source is not None and source.endswith(".toml"):
        return [{"preset": "none"}, read(Path(source))]
    return [{} if source is None else {"data": source}]


def _going_on(
    folder: Path, source: str | None, asked: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], list[str]]:
    """The values of the run in a folder with what is asked of it now; and what a person should know.

    The command that began a run may be given again: what was measured then stays as it is.
    """
    own = read(folder / RECIPE)
    recipe = layered(own)
    given = [*_from_source(source), asked]
    wanted = {name: value for values in given for name, value in values.items() if name in FIXED}
    for name, value in wanted.items():
        has = getattr(recipe, name)
        if value != has and not (isinstance(has, str) and isinstance(value, str) and same_place(value, has)):
            raise ValueError(
                f"{folder} was begun with {name}={has}, not {value}; a run goes on with its own pictures and "
                "weights. Leave that out, or begin another run with another --out"
            )
    settled = {*FIXED, "preset", "minutes"}
    measured = {"precision": "auto", "attention": "auto"}
    changed = [
        {
            name: value
            for name, value in values.items()
            if name not in settled and value != measured.get(name, ())
        }
        for values in given
    ]
    notes = []
    if "minutes" in asked:
        notes.append(
            f"the run goes on with its {recipe.epochs:g} epochs, as minutes count when a run begins; give "
            "epochs=… for more or fewer"
        )
    return [own, *changed], notes


def _refuse_taken(folder: Path) -> None:
    """A new run begins in a folder that holds nothing it would write over."""
    if is_run(folder):
        raise ValueError(f"{folder} already holds a run; go on with --resume, or choose another --out")
    if taken := [name for name in OTHERS if (folder / name).exists()]:
        raise ValueError(
            f"{folder} is no run, but holds {', '.join(taken)}, which a run would write over; choose another "
            "--out"
        )


def _set_up(
    values: Sequence[Mapping[str, Any]], here: Processes, folder: Path, data: Data | None, *, strict: bool
) -> Setting:
    """Data, model, objective and loaders. data: that of the run, where it goes on."""
    given = layered(*values)
    dataset = dataset_of(given)
    if data is None:
        refuse_one_class(dataset.classes)
    else:
        refuse_changed(dataset, data, folder, data.digests)
    pictures = dataset.splits["train"]
    side, channels = _native(pictures)

    notes = []
    named = next((layer["preset"] for layer in reversed(values) if "preset" in layer), None)
    if named is None:
        named, why = choose(given, dataset.kind, len(pictures))
        notes.append(f"preset {named}: {why}")
    recipe = layered(preset(named, side), *values, {"preset": named})
    share = 2 * recipe.accumulate * here.world
    if recipe.batch % share:
        raise ValueError(
            f"batch={recipe.batch} does not divide into pairs for {here.world} processes and "
            f"{recipe.accumulate} parts of a batch; expected a multiple of {share}"
        )
    with warnings.catch_warnings(record=True) as caught:  # what loading had to change is told, not warned of
        warnings.simplefilter("always")
        model = _model(recipe, dataset.classes, side, channels).to(here.device)
        teacher = (
            None if recipe.teacher is None else _teacher(recipe.teacher, dataset.classes).to(here.device)
        )
    notes += [str(warning.message) for warning in caught]
    every = sum(map(len, dataset.splits.values())) * here.world
    stores = {
        split: Store(
            pictures,
            model.preprocess,
            exact=split != "train",
            memory=int(recipe.cache * 2**30 * len(pictures) / every),
        )
        for split, pictures in dataset.splits.items()
    }
    if data is None:
        notes += learned_before(dataset, recipe)
        tick = ticker("reading picture") if here.first else None
        workers = recipe.workers or max(1, cores() // here.world)
        findings = examine(stores, strict=strict, workers=workers, progress=tick)
        data = agreed(data_of(dataset, findings, notes), here)  # a read that fails may succeed elsewhere
    bad = left_out(dataset, data)
    loaders = {
        split: Loader(
            store,
            batch=recipe.batch,
            train=split == "train",
            augment=recipe.augment if split == "train" else None,
            seed=recipe.seed,
            leave_out=bad[split],
            rank=here.rank,
            world=here.world,
            workers=recipe.workers,
            device=here.device,
        )
        for split, store in stores.items()
    }
    objective = OBJECTIVES[recipe.objective](recipe, teacher)
    return Setting(recipe, dataset, model, objective, loaders, data, here)


def _native(pictures: Pictures) -> tuple[Sides | None, int]:
    """The size (height, width) of pictures that are all alike and small, else None; and their channels."""
    some = torch.linspace(0, len(pictures) - 1, min(len(pictures), LOOKED_AT)).long().tolist()
    seen = []
    for index in some:
        with suppress(PictureError, OSError):  # examine tells of those
            seen.append(open_picture(pictures.data(index)))
    sizes = {(picture.height, picture.width) for picture in seen}
    grey = all(band == bands[0] for bands in (picture.split() for picture in seen) for band in bands)
    small = len(sizes) == 1 and max(max(sizes)) <= NATIVE
    return (sizes.pop() if small else None), 1 if grey else 3


def _model(recipe: Recipe, classes: tuple[str, ...], side: Sides | None, channels: int) -> Model:
    """Begun anew with weights that the seed decides, or from those that the recipe starts with."""
    options = dict(recipe.model)
    torch.manual_seed(mix(recipe.seed, "weights"))  # of the whole model, or of a head that starts anew
    if recipe.start is not None:
        if "name" in options:
            raise ValueError(
                f"start={recipe.start!r} and model={options['name']!r} are two beginnings; give one"
            )
        return load(
            recipe.start,
            labels=classes,
            image_size=recipe.image_size,
            dtype=torch.float32,
            **options,
        )
    name = options.pop("name", "vit-ti/16")
    size = recipe.image_size or side
    options |= {"channels": channels} | ({"image_size": size} if size else {})
    model = create(name, labels=classes, **options)
    if side is not None:  # small pictures are shown whole
        half = (0.5,) * channels
        model.preprocess = Preprocess(
            resize=model.config.image_size, interpolation="bicubic", mean=half, std=half
        )
    return model


def _teacher(place: str, classes: tuple[str, ...]) -> Model:
    teacher = load(place, dtype=torch.float32)
    known = teacher.labels or classes
    if teacher.config.classes != len(classes) or known != classes:
        raise ValueError(
            f"teacher={place} tells {teacher.config.classes} classes ({', '.join(known[:3])} …), the "
            f"pictures have {len(classes)} ({', '.join(classes[:3])} …); train it on the same pictures first"
        )
    return teacher


def _settle(setting: Setting, *, dry_run: bool) -> tuple[Setting, Pace | None]:
    """What is left open, decided by measurement: the precision, and the epochs that fit into the minutes."""
    recipe = setting.recipe
    if not (dry_run or recipe.minutes or "auto" in (recipe.precision, recipe.attention)):
        return setting, None
    recipe, measured = agreed(
        settle(setting.model, setting.objective, setting.batches, recipe, setting.here), setting.here
    )
    if recipe.minutes is not None:
        epochs = KEPT * 60 * recipe.minutes / _epoch_seconds(setting, measured)
        recipe = replace(recipe, epochs=round(epochs, 2) or 0.01, minutes=None)
    return setting._replace(recipe=recipe), measured


def _epoch_seconds(setting: Setting, measured: Pace) -> float:
    """With its validations, which compute no gradients: a third of the work for each picture."""
    validation = len(setting.dataset.splits["val"]) / setting.recipe.batch / 3
    return measured.seconds * setting.per_epoch * (1 + validation / setting.period)


def _summary(setting: Setting, measured: Pace | None, folder: Path) -> str:
    """What is going to happen."""
    recipe, model = setting.recipe, setting.model
    freeze(model, recipe.learns)
    total = sum(parameter.numel() for parameter in model.parameters())
    learning = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    sizes = ", ".join(f"{len(pictures):,} {split}" for split, pictures in setting.dataset.splits.items())
    height, width = model.preprocess.size
    name = recipe.start or recipe.model.get("name")
    lines = [
        f"pictures   {sizes}, of {len(setting.dataset.classes)} classes, seen at {height}x{width}"
        + (" in grey" if model.config.channels == 1 else ""),
        f"model      {name}, {total:,} parameters, {learning:,} of them learn",
        f"learning   {recipe.objective}, {recipe.epochs:g} epochs of {setting.per_epoch:,} steps of "
        f"{recipe.batch}, {recipe.precision}, processes: {setting.here.world} ({setting.here.device.type})",
        f"run folder {folder}",
    ]
    if measured is not None:
        duration = _epoch_seconds(setting, measured) * recipe.epochs
        lines.append(
            f"measured   {recipe.batch / measured.seconds:,.0f} pictures/s, so about {clock(duration)}; "
            f"{measured.memory / 2**30:.1f} GiB of memory"
        )
    return "\n".join(lines)


def _latest() -> Path:
    """The run that was last written to."""
    states = [path for name in STATES for path in RUNS.glob(f"*/{name}")]
    if not states:
        raise ValueError(f"there is no run in {RUNS}/ to go on with; name its folder with --out")
    return max(states, key=lambda path: path.stat().st_mtime).parent


def _unused(data: str) -> Path:
    """runs/NAME after the pictures' name, or NAME-2 and so on."""
    name = Path(data).resolve().stem or "run"
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(RUNS / name for name in names if not (RUNS / name).exists())
