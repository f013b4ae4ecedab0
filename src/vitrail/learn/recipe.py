"""Recipes: everything that decides a run, in one flat config that a short TOML file holds."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from vitrail.attention import BACKENDS
from vitrail.data.augment import Augment
from vitrail.data.readers import NAMED
from vitrail.learn.objectives import OBJECTIVES
from vitrail.learn.optimiser import Part
from vitrail.models.config import build_config
from vitrail.words import unknown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a run is made of; on the same data, start and number of threads it decides every bit."""

    preset: str = "none"  # the key of PRESETS that lies under it
    seed: int = 0

    # the data
    data: str = "digits"  # a folder, file, or name that data.sources.open_source knows
    validation: float = 0.1  # the share of training pictures kept apart, where no such split exists
    test: float = 0.1
    workers: int | None = None  # threads of each process that decode; None: one for each core
    cache: float = 4.0  # GiB of decoded pictures kept in memory, by all processes together
    augment: Augment = field(default_factory=Augment)

    # the model: {"name": …} and changes to its config; or where its weights start from, and changes
    model: dict = field(default_factory=dict)
    start: str | None = None  # anything that vitrail.load reads
    image_size: tuple[int, int] | None = None  # None: the model's own, or the pictures' if they are small
    learns: Part = "full"  # all of it, only the "head", or the last N blocks and what follows them

    # the objective
    objective: str = "classify"  # a key of objectives.OBJECTIVES
    smoothing: float = 0.1
    mixup: float = 0.0  # α of Beta(α, α); 0: none
    cutmix: float = 0.0
    teacher: str | None = None  # for the distilling ones: anything that vitrail.load reads
    teacher_weight: float = 0.5
    temperature: float = 1.0

    # the optimiser: AdamW
    batch: int = 256  # over all processes and accumulated parts
    accumulate: int = 1  # parts that a batch is computed in, to save memory
    lr: float = 1e-3
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.999)
    layer_decay: float = 1.0  # how much slower each layer learns than the one after it
    clip: float = 1.0  # the largest norm of the gradients; 0: any
    ema: float = 0.0  # decay of the averaged weights, which are then what is kept; 0: none

    # the schedule: warm-up, then half a cosine
    epochs: float = 30.0
    minutes: float | None = None  # instead of epochs: as many as fit, by the rate measured at the start
    warmup: float = 0.05  # share of all steps
    floor: float = 0.0  # share of lr that is left at the end

    # the machine
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto: CUDA where there is one, else the CPU
    precision: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: the faster, measured at the start
    attention: str = "auto"  # a key of attention.BACKENDS; auto: the fastest, measured at the start
    compile: bool = False
    checkpoint_blocks: bool = False  # less memory for more time
    save_seconds: float = 60.0  # between states to resume from

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        for name, known in (
            ("preset", PRESETS),
            ("objective", OBJECTIVES),
            ("attention", ("auto", *BACKENDS)),
        ):
            if getattr(self, name) not in known:
                raise ValueError(unknown(name, getattr(self, name), known))
        for name, (low, high) in BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ValueError(f"{name}={value!r} is not possible; expected from {low:g} to {high:g}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={self.betas} are not possible; expected two from 0 to below 1")
        if isinstance(self.learns, int) and self.learns < 0:
            raise ValueError(
                f"learns={self.learns} is not possible; expected full, head, or a number of blocks"
            )
        if not isinstance(self.model.get("name", ""), str):
            raise ValueError(f"model={self.model['name']} is no model; expected a name, such as vit-ti/16")
        if decided := DECIDED & self.model.keys():
            raise ValueError(
                f"model.{min(decided)} is not chosen like that: image_size=… decides it, or the pictures, or "
                "the weights that it starts from"
            )
        if self.batch % (2 * self.accumulate):
            raise ValueError(
                f"batch={self.batch} does not divide into {self.accumulate} parts of whole pairs; expected a "
                f"multiple of {2 * self.accumulate}"
            )
        if self.objective.startswith("distil") != (self.teacher is not None):
            raise ValueError(
                f"objective={self.objective!r} with teacher={self.teacher!r}; expected both "
                "objective=distil-hard (or distil-soft) and teacher=MODEL, or neither"
            )


TINY, MOST = 1e-12, 1e6
BOUNDS: dict[str, tuple[float, float]] = {
    "seed": (0, 2**63 - 1),
    "validation": (TINY, 0.9),
    "test": (0, 0.9),
    "workers": (1, 1024),
    "cache": (0, MOST),
    "smoothing": (0, 0.999),
    "mixup": (0, MOST),
    "cutmix": (0, MOST),
    "teacher_weight": (0, 1),
    "temperature": (TINY, MOST),
    "batch": (2, MOST),
    "accumulate": (1, MOST),
    "lr": (0, 1e3),
    "weight_decay": (0, 10),
    "layer_decay": (TINY, 1),
    "clip": (0, MOST),
    "ema": (0, 1),
    "epochs": (TINY, 1 / TINY),
    "minutes": (TINY, MOST),
    "warmup": (0, 1),
    "floor": (0, 1),
    "save_seconds": (0, 1 / TINY),
}

# What is said of a model elsewhere.
DECIDED = {"image_size", "channels", "classes", "labels", "dtype", "source"}

# Where a run may begin; recipes and changes on the command line are laid over it.
PRESETS: dict[str, dict[str, Any]] = {
    "none": {},
    # Little data from scratch: convolutions see what a plain ViT would have to learn (Xiao et al. 2021),
    # every patch votes, and of a short time small pictures leave the most epochs. Measured on photos: more
    # convolutions and fewer blocks learn faster; Mixup and CutMix only pay in runs many times as long.
    "small": {
        "model": {
            "name": "vit-ti/16",
            "depth": 3,
            "stem": "conv",
            "stem_convolutions": 3,
            "pool": "mean",
            "class_token": False,
            "drop_path": 0.1,
        },
        "augment": {"scale": [0.35, 1.0], "layers": 1, "magnitude": 0.3, "erase": 0.0},
        "batch": 128,
        "lr": 1e-3,
        "ema": 0.99,
        "minutes": 15.0,
    },
    "tune": {
        "augment": {"scale": [0.35, 1.0], "layers": 2, "magnitude": 0.2, "erase": 0.1},
        "model": {"drop_path": 0.05},
        "batch": 64,
        "lr": 5e-4,
        "layer_decay": 0.75,
        "ema": 0.99,
        "minutes": 10.0,
    },
    "head": {
        "learns": "head",
        "augment": {"scale": [0.6, 1.0], "layers": 0, "erase": 0.0},
        "batch": 64,
        "lr": 3e-3,
        "weight_decay": 0.0,
        "smoothing": 0.0,
        "epochs": 10.0,
    },
    # 8x8 pixels are too few to stride over: enlarged, they make 4x4 tokens through four convolutions.
    "digits": {
        "image_size": 16,
        "model": {
            "name": "vit-ti/4",
            "width": 96,
            "depth": 4,
            "heads": 3,
            "mlp_width": 192,
            "stem": "conv",
            "stem_convolutions": 2,
            "pool": "mean",
            "class_token": False,
        },
        "augment": {"scale": [0.6, 1.0], "flip": 0.0, "layers": 0, "erase": 0.0},
        "mixup": 0.2,
        "batch": 64,
        "lr": 2e-3,
        "ema": 0.99,
        "epochs": 40.0,
        "precision": "float32",  # measuring what is faster would take longer than it saves
        "attention": "fused",
    },
}

SIDE = 96  # what the small preset sees larger pictures at
PATCHES_ACROSS = 8  # its patches to a side, as nearly as powers of two come
SMALL = 200_000  # fewer pictures than this do not teach a plain ViT what convolutions see from the start


def choose(recipe: Recipe, kind: str, pictures: int) -> tuple[str, str]:
    """The preset for a run that names none, and why. kind: what was opened, as a Dataset says it."""
    if recipe.start is not None:
        return "tune", f"the weights of {recipe.start} are tuned gently, the first layers the least"
    if kind == NAMED["digits"].what:
        return "digits", "the built-in digits have a size of model and a schedule of their own"
    if pictures < SMALL:
        return "small", (
            f"{pictures:,} pictures are few to learn from scratch: convolutional stem, mean pooling, strong "
            "augmentation (--from a trained model, if there is one, does better)"
        )
    return "none", f"{pictures:,} pictures are enough for the papers' settings"


def preset(name: str, side: tuple[int, int] | None) -> dict[str, Any]:
    """The values of a preset; "small" fits its patches to the side of pictures that are small themselves."""
    if name != "small":
        return PRESETS[name]
    size = side or (SIDE, SIDE)
    patch = 2 ** max(round(math.log2(max(size) / PATCHES_ACROSS)), 1)
    small = PRESETS["small"]
    return {**small, "image_size": size, "model": {**small["model"], "name": f"vit-ti/{patch}"}}


def layered(*layers: Mapping[str, Any]) -> Recipe:
    """A recipe from layers of values, the later over the earlier.

    A layer that names a model brings it whole: what earlier layers changed in theirs is forgotten.
    Of epochs and minutes, the later counts.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        for one, other in (("epochs", "minutes"), ("minutes", "epochs")):
            if layer.get(one) is not None and layer.get(other) is None:
                merged.pop(other, None)
        for name, value in layer.items():
            if name == "model" and isinstance(value, str):
                value = {"name": value}
            if isinstance(value, Mapping) and isinstance(merged.get(name), Mapping) and "name" not in value:
                value = {**merged[name], **value}
            merged[name] = value
    return build_config(Recipe, merged)


def same_place(one: str, other: str) -> bool:
    """Whether two words of recipes lead to the same; a name, as that of the digits, leads to no folder."""
    return one == other or (
        NAMED.keys().isdisjoint({one, other}) and Path(one).resolve() == Path(other).resolve()
    )


def from_anywhere(recipe: Recipe) -> Recipe:
    """The same, its paths written in full; what is none (the digits, an id of a hub) stays as it is."""

    def full(place: str) -> str:
        return os.path.abspath(place) if os.path.exists(place) else place

    return replace(
        recipe,
        data=recipe.data if recipe.data in NAMED else full(recipe.data),
        start=recipe.start and full(recipe.start),
        teacher=recipe.teacher and full(recipe.teacher),
    )


def read(path: Path) -> dict[str, Any]:
    """The values in a TOML file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no valid TOML: {error}") from None


def changes(assignments: Sequence[str]) -> dict[str, Any]:
    """Values from words such as epochs=30, model=vit-ti/4, model.pool=mean, augment.scale=[0.5,1], test=0."""
    values: dict[str, Any] = {}
    hints = get_type_hints(Recipe)
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name:
            raise ValueError(f"{assignment!r} is no change to the recipe; write field=value, as in epochs=30")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text  # what TOML cannot read is a word
        hint = hints.get(name)
        if str in (hint, *get_args(hint)) and not isinstance(value, str):
            value = text  # a folder may be called 2024
        if text.lower() == "none" and hint is not str:
            value = None
        name, dot, inner = name.partition(".")
        if name == "model" and not dot and not isinstance(value, dict):
            dot, inner = ".", "name"
        if dot:
            earlier = values.get(name)
            values[name] = {**(earlier if isinstance(earlier, dict) else {}), inner: value}
        else:
            values[name] = value
    return values


def to_toml(recipe: Recipe, heading: str) -> str:
    """The recipe as a file that `read` reads back, all fields in it."""
    values = {name: value for name, value in asdict(recipe).items() if value is not None}
    tables = {name: values.pop(name) for name, value in list(values.items()) if isinstance(value, dict)}
    lines = [f"# {line}" for line in heading.splitlines()]
    lines += ["", *(f"{name} = {_toml(value)}" for name, value in values.items())]
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{k} = {_toml(v)}" for k, v in table.items() if v is not None)]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    """What JSON and TOML write alike: words, numbers, yes and no, and lists of them."""
    return json.dumps(value, ensure_ascii=False)
