"""One folder of pictures for each class."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from vitrail.data.readers.found import SPLITS, Found, is_picture, read_file, readable


def has_class_folders(place: Path) -> bool:
    """Whether pictures lie in folders of this folder."""
    folders = _split_folders(place) or [("train", place)]
    return any(_pictures_below(of_class) for _, folder in folders for of_class in _folders(folder))


def read_folders(place: Path) -> Found:
    """Folders of classes, which may lie in folders of splits."""
    found = Found(read=read_file)
    folders = _split_folders(place) or [("train", place)]
    names = sorted({of_class.name for _, folder in folders for of_class in _folders(folder)})
    if SPLITS.keys() >= {name.lower() for name in names}:
        raise ValueError(f"{place}: expected a folder for each class inside of {', '.join(names)}")
    found.classes = tuple(map(readable, names))
    beside = {folder.name for folder in _folders(place)} - {folder.name for _, folder in folders}
    if folders[0][1] != place and beside:
        found.notes.append(f"{', '.join(sorted(beside))} beside {folders[0][1].name} is passed over")
    passed: list[str] = []
    inside: list[str] = []
    for split, folder in folders:
        for of_class in _folders(folder):
            for parent, below, files in _walk(of_class):
                inside += [os.path.join(parent, name) for name in below if name in names]
                for file in files:
                    path = os.path.join(parent, file)
                    if is_picture(file):
                        found.add(split, path, path, of_class.name)
                    else:
                        passed.append(path)
    if inside:
        found.notes.append(
            f"{readable(inside[0])} lies inside another class but has the name of a class: its pictures "
            f"count for the outer one ({len(inside)} such folders); move it if that is wrong"
        )
    if passed:
        found.notes.append(
            f"{len(passed):,} files are no pictures by their names, such as {readable(passed[0])}"
        )
    return found


def _folders(place: Path) -> list[Path]:
    if not place.is_dir():
        return []
    return sorted(entry for entry in place.iterdir() if entry.is_dir() and not _is_hidden(entry.name))


def _split_folders(place: Path) -> list[tuple[str, Path]]:
    """(split, folder) for the folders that are called like a split and hold folders themselves."""
    folders = [folder for folder in _folders(place) if folder.name.lower() in SPLITS and _folders(folder)]
    return [(SPLITS[folder.name.lower()], folder) for folder in folders]


def _walk(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Folders below, each with its folders and files, in order and without hidden ones."""
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not _is_hidden(name))
        yield parent, folders, sorted(name for name in files if not _is_hidden(name))


def _pictures_below(folder: Path) -> bool:
    return any(is_picture(file) for _, _, files in _walk(folder) for file in files)


def _is_hidden(name: str) -> bool:
    return name.startswith((".", "__"))  # __MACOSX and ._photo.jpg come with archives made on a Mac
