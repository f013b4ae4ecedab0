"""What every reader gives, and what several of them need."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

# What people call the splits, in any letter case; t10k is the test part of MNIST and its kin.
SPLITS = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "dev": "val",
    "test": "test",
    "testing": "test",
    "t10k": "test",
}

# Folders that only hold the files of a place: its splits, data/ on the hub, raw/ of torchvision.
INSIDE = {*SPLITS, "data", "raw"}

# Column → what people call it, the surest first.
COLUMNS = {
    "picture": (
        *("path", "filepath", "file_path", "filepaths", "file", "filename", "file_name"),
        *("image", "img", "image_path", "img_path"),
    ),
    "label": (
        *("label", "labels", "class", "class_name", "label_name", "target", "category", "fine_label"),
        *("class_id", "label_id", "category_id"),
    ),
    "split": ("split",),
}


class Rows(NamedTuple):
    """The pictures of a split: items as `read` takes them, their names, the names of their classes."""

    items: Any
    names: list[str]
    labels: list[str | None]


@dataclass
class Found:
    """What a reader makes of a place. classes: all names in their order, where the place says so."""

    splits: dict[str, Rows] = field(default_factory=lambda: defaultdict(lambda: Rows([], [], [])))
    read: Callable[[Any], Any] = lambda item: item
    classes: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)

    def add(self, split: str, item: Any, name: str, label: str | None) -> None:
        """One more picture."""
        row = (item, readable(name), label and readable(label))
        for column, value in zip(self.splits[split], row, strict=True):
            column.append(value)


def readable(name: str) -> str:
    """The name of a file as text, which it need not be: any bytes are allowed."""
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Names the file in whatever goes wrong while it is read."""
    try:
        yield
    except (ImportError, MemoryError):  # no fault of the file
        raise
    except UnicodeError as error:
        raise ValueError(
            f"{path} cannot be read: expected text in UTF-8, but it holds other bytes"
        ) from error
    except Exception as error:  # a damaged file leads to almost anything
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{path} cannot be read: {reason}") from error


def need(module: str, what: str) -> Any:
    """A module of the extra packages."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f'{what} needs {module}; run: pip install "vitrail[data]"') from error


def split_named(name: str) -> str:
    """The split that a word of the name says: train-0001.tar, emnist-digits-test-images; else train."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    return next((SPLITS[word] for word in words if word in SPLITS), "train")


def files_of(place: Path, *patterns: str) -> list[tuple[str, Path]]:
    """(split, file) for the files whose names match in lower case, in order.

    They are the place itself, or lie in it or in those of its folders that `INSIDE` names. The split is
    what the name of such a folder says, or else that of the file.
    """

    def fits(name: str) -> bool:
        return any(fnmatchcase(name.lower(), pattern) for pattern in patterns)

    if place.is_file():
        return [(split_named(place.name), place)] if fits(place.name) else []
    folders = [place, *(folder for folder in folders_of(place) if folder.name.lower() in INSIDE)]
    found = sorted(
        folder / entry.name
        for folder in folders
        if folder.is_dir()
        for entry in os.scandir(folder)
        if fits(entry.name) and entry.is_file() and not is_hidden(entry.name)
    )
    return [(split_named(str(path.relative_to(place))), path) for path in found]


def folders_of(place: Path) -> list[Path]:
    """The folders in it, in order."""
    if not place.is_dir():
        return []
    entries = os.scandir(place)
    return sorted(place / entry.name for entry in entries if entry.is_dir() and not is_hidden(entry.name))


def walk(folder: str | os.PathLike[str]) -> Iterator[tuple[str, list[str]]]:
    """The folder and those below, each with its files, in order and without hidden ones."""
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not is_hidden(name))
        yield parent, sorted(name for name in files if not is_hidden(name))


def pictures_below(folder: str | os.PathLike[str]) -> Iterator[str]:
    """The files in it and in its folders that are pictures by their names."""
    return (
        os.path.join(parent, name) for parent, names in walk(folder) for name in names if is_picture(name)
    )


def expanded(places: Iterable[str | os.PathLike[str]]) -> list[str]:
    """The files as they were named, and in place of a folder all pictures below it, sorted."""
    paths: list[str] = []
    for place in places:
        found = sorted(pictures_below(place))
        if os.path.isdir(place) and not found:
            raise ValueError(f"{place} holds no pictures")
        paths += found or [os.fspath(place)]
    return paths


def is_hidden(name: str) -> bool:
    """Whether a file or folder of this name is not meant to be seen."""
    return name.startswith((".", "__"))  # __MACOSX and ._photo.jpg come with archives made on a Mac


def read_file(path: str) -> bytes:
    """The bytes of a file."""
    return Path(path).read_bytes()


def roles_of(header: Sequence[str]) -> dict[str, str]:
    """What is told of a picture → the name of the column that tells it."""
    plain = {re.sub(r"\W+", "_", name.strip(' "').lower()): name for name in header}
    known = {role: [plain[name] for name in names if name in plain] for role, names in COLUMNS.items()}
    return {role: names[0] for role, names in known.items() if names}


def label_named(value: Any, names: Sequence[str] = ()) -> str | None:
    """The name of a class; None where nothing is said, for which datasets writes -1 and pandas NaN."""
    if isinstance(value, (list, dict)):
        raise ValueError(f"a picture has the label {value}; expected one class for each")
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # pandas makes 3.0 of 3 where another label is missing
    if names and isinstance(value, int):
        if value >= len(names):
            raise ValueError(f"it has the label {value}; expected 0 to {len(names) - 1}, for {names[0]} …")
        return names[value] if value >= 0 else None
    name = "" if value is None else str(value).strip()
    return None if name.lower() in ("", "nan") else name


def is_picture(name: str) -> bool:
    """Whether a file of this name is one that can be read, by its ending."""
    ending = os.path.splitext(name)[1].lower()
    return Image.registered_extensions().get(ending) in Image.OPEN
