"""One folder of pictures for each class."""

from __future__ import annotations

import os
from pathlib import Path

from vitrail.data.readers.found import (
    SPLITS,
    Found,
    folders_of,
    is_picture,
    pictures_below,
    read_file,
    readable,
    walk,
)


def has_class_folders(place: Path) -> bool:
    """Whether pictures lie in folders of this folder."""
    folders = _split_folders(place) or [("train", place)]
    return any(any(pictures_below(of_class)) for _, folder in folders for of_class in folders_of(folder))


def read_folders(place: Path) -> Found:
    """Folders of classes, which may lie in folders of splits."""
    found = Found(read=read_file)
    folders = _split_folders(place) or [("train", place)]
    names = {of_class.name for _, folder in folders for of_class in folders_of(folder)}
    if SPLITS.keys() >= {name.lower() for name in names}:
        raise ValueError(f"{place}: expected a folder for each class inside of {', '.join(sorted(names))}")
    found.classes = tuple(map(readable, sorted(names)))
    strayed: list[str] = []
    nested: list[str] = []
    passed: list[str] = []
    for split, folder in folders:
        for of_class in folders_of(folder):
            for parent, files in walk(of_class):
                pictures = [os.path.join(parent, file) for file in files if is_picture(file)]
                passed += [os.path.join(parent, file) for file in files if not is_picture(file)]
                for path in pictures:
                    found.add(split, path, path, of_class.name)
                inside = {*Path(parent).relative_to(of_class).parts}
                if inside and pictures:
                    (strayed if (inside - {of_class.name}) & names else nested).append(parent)
    if strayed:
        found.notes.append(
            f"pictures most likely have the wrong class: {len(strayed)} folders are called like a class, but "
            f"lie inside of another and count for that, such as {readable(strayed[0])}; move them out"
        )
    if nested:
        found.notes.append(
            f"pictures in {len(nested)} folders inside of class folders count for the outer class, such as "
            f"{readable(nested[0])}; move them out if they are classes of their own"
        )
    beside = {folder.name for folder in folders_of(place)} - {folder.name for _, folder in folders}
    if folders[0][1] != place and beside:
        found.notes.append(f"{', '.join(sorted(beside))} beside {folders[0][1].name} is passed over")
    if passed:
        found.notes.append(
            f"{len(passed):,} files are no pictures by their names, such as {readable(passed[0])}"
        )
    return found


def _split_folders(place: Path) -> list[tuple[str, Path]]:
    """(split, folder) for the folders that are called like a split and hold folders themselves."""
    folders = [folder for folder in folders_of(place) if folder.name.lower() in SPLITS and folders_of(folder)]
    return [(SPLITS[folder.name.lower()], folder) for folder in folders]
