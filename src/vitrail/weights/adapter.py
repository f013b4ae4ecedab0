"""What every form of weights is read into, and what the adapters share."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from vitrail.data.preprocess import Preprocess
from vitrail.models.base import Model
from vitrail.models.vit import SIZES, ViTConfig
from vitrail.weights.checkpoint import Checkpoint
from vitrail.weights.errors import LoadError, SaveError
from vitrail.weights.files import Stored
from vitrail.weights.names import Table


class Draft(NamedTuple):
    """What a checkpoint says it is, in our terms."""

    config: Any
    table: Table
    tensors: Mapping[str, Stored]  # by the names that the table knows
    preprocess: Preprocess | None = None  # None: the usual
    labels: tuple[str, ...] = ()
    system: str = "vit"
    unused: frozenset[str] = frozenset()  # tensors that may be there and serve training alone
    spare: tuple[str, ...] = ()  # tensors that are there and have no part in the answer, for a warning
    guessed: tuple[str, ...] = ()  # what the checkpoint did not say, for a warning


class Adapter(NamedTuple):
    """One form of weights."""

    is_one: Callable[[Checkpoint], bool]
    # The checkpoint, and what the caller of load asked for (heads, image_size, …) that may help.
    read: Callable[[Checkpoint, Mapping[str, Any]], Draft]
    write: Callable[[Model, Path], None]  # to a new file, or an empty folder
    endings: tuple[str, ...] = ()  # of the one file that it is; without any, it is a folder

    @property
    def folder(self) -> bool:
        """Whether it is a folder of files."""
        return not self.endings


def numbered(names: Iterable[str], pattern: str) -> int:
    """How many different numbers the pattern's one group takes among the names: blocks, units."""
    matches = (re.match(pattern, name) for name in names)
    return len({match[1] for match in matches if match})


def heads_of(width: int, asked: Mapping[str, Any], where: str) -> int:
    """Heads of a model whose file does not tell them: the papers' at this width, or of width 64."""
    usual = {size[0]: size[2] for size in SIZES.values()}
    heads = asked.get("heads", usual.get(width, width // 64))
    if width % 64 and "heads" not in asked:
        raise LoadError(
            f"{where} does not tell the number of heads, and its width {width} is no usual one; "
            "say it: load(…, heads=…)"
        )
    return heads


def assumed(config: ViTConfig, asked: Mapping[str, Any], fields: Iterable[str]) -> tuple[str, ...]:
    """Those of the fields that the caller did not say, as they could be said; none for a paper's model."""
    shape = (config.width, config.depth, config.heads, config.mlp_width)
    if shape in SIZES.values():
        return ()
    return tuple(f"{name}={getattr(config, name)!r}" for name in fields if name not in asked)


def image_size_of(
    counts: Iterable[int], patch: tuple[int, int], asked: Mapping[str, Any], where: str
) -> tuple[int, int]:
    """The size that positions were learned at: a square, unless only what was asked for fits them."""
    return image_sizes_of(counts, patch, asked, where)[-1]


def image_sizes_of(
    counts: Iterable[int], patch: tuple[int, int], asked: Mapping[str, Any], where: str
) -> list[tuple[int, int]]:
    """The sizes that positions may have been learned at: what was asked for if it fits, then squares.

    counts: how many patches they may be for, the likeliest first.
    """
    counts = [cells for cells in counts if cells > 0]
    height, width = pair(asked.get("image_size", 0))
    squares = ((math.isqrt(cells), math.isqrt(cells)) for cells in counts)
    grids = dict.fromkeys(((-(-height // patch[0]), -(-width // patch[1])), *squares))
    sizes = [(rows * patch[0], columns * patch[1]) for rows, columns in grids if rows * columns in counts]
    if not sizes:
        raise LoadError(
            f"{where} has positions for {' or '.join(map(str, counts)) or 'no'} patches of "
            f"{patch[0]}x{patch[1]}, which form no square; say what it was trained at: "
            "load(…, image_size=(height, width))"
        )
    return sizes


def pair(value: Any) -> tuple[int, int]:
    """A size given as one number or two."""
    height, width = value if isinstance(value, list | tuple) else (value, value)
    return height, width


def check_whole_patches(config: ViTConfig, where: str) -> None:
    """Refuses what other libraries cut off and ours pad: what does not fill a patch."""
    if any(size % patch for size, patch in zip(config.image_size, config.patch, strict=True)):
        raise LoadError(
            f"{where}: image_size={config.image_size} is no multiple of patch={config.patch}; what is left "
            "over is cut off by other libraries and padded here, which gives other answers"
        )


def check_positions(config: ViTConfig, library: str) -> None:
    """Refuses what a library cannot say that always has learned positions, of special tokens too."""
    if config.positions != "learned":
        raise SaveError(f"{library} always has learned positions; got positions={config.positions!r}")
    if config.positioned != config.special_tokens:
        raise SaveError(
            f"{library} has positions for all special tokens; got positioned_tokens={config.positioned}; say "
            f"positioned_tokens={config.special_tokens} on the way"
        )


def canonical(config: ViTConfig) -> ViTConfig:
    """The config with one way to say that all special tokens have positions, where there are two."""
    every = config.positioned == config.special_tokens or config.positions != "learned"
    return replace(config, positioned_tokens=None) if every else config


# Fields that a load can change: the tensors stay, or say the same in another way.
CHANGEABLE = {"norm_eps", "positioned_tokens", "position_resize", "dropout", "attention_dropout", "drop_path"}


def refuse_changed(library: str, ours: Any, theirs: Any, free: Iterable[str] = ()) -> None:
    """Names the fields of a config or a preprocessing that would come back as something else."""
    lost = {
        field.name: getattr(theirs, field.name)
        for field in fields(ours)
        if field.name not in free and getattr(ours, field.name) != getattr(theirs, field.name)
    }
    if not lost:
        return
    told = ", ".join(f"{name}={getattr(ours, name)!r} (it would be {back!r})" for name, back in lost.items())
    instead = " ".join(f"{name}={back!r}" for name, back in lost.items())
    way = f"say {instead} on the way" if lost.keys() <= CHANGEABLE else "it cannot be written in that form"
    raise SaveError(f"{library} cannot say {told}; {way}")
