"""Tar shards in the layout of webdataset."""

from __future__ import annotations

import json
import tarfile
from collections import defaultdict
from pathlib import Path

from vitrail.data.readers.found import (
    Found,
    files_of,
    is_hidden,
    is_picture,
    label_named,
    reading,
    roles_of,
)

COMPRESSED = ("*.tar.gz", "*.tgz", "*.tar.bz2", "*.tar.xz", "*.tar.zst")


def is_shards(place: Path) -> bool:
    """Whether there are tar files."""
    return bool(files_of(place, "*.tar", *COMPRESSED))


def read_shards(place: Path) -> Found:
    """Tar files in which key.jpg (or another picture) stands beside key.cls or key.json."""
    found = Found(read=_read_member)
    for _, path in files_of(place, *COMPRESSED):
        found.notes.append(
            f"{path} is passed over: pictures are read from where they lie in a .tar file, so it must not be "
            "compressed; decompress it first"
        )
    for split, path in files_of(place, "*.tar"):
        samples: dict[str, dict[str, tuple[str, int, int]]] = defaultdict(dict)
        with reading(path), tarfile.open(path, "r:") as archive:
            for member in archive:
                folder, slash, file = member.name.rpartition("/")
                key, _, ending = file.partition(".")
                if member.isfile() and not is_hidden(file):
                    item = (str(path), member.offset_data, member.size)
                    samples[folder + slash + key][ending.lower()] = item
        for key, members in samples.items():
            endings = [ending for ending in members if is_picture(f"{key}.{ending}")]
            if endings:
                with reading(path / key):
                    label = _member_label(members)
                photo = min(endings, key=lambda ending: ending.count("."))  # depth.png only tells more of jpg
                found.add(split, members[photo], f"{path}/{key}", label)
    return found


def _member_label(members: dict[str, tuple[str, int, int]]) -> str | None:
    if "cls" in members:
        return label_named(_read_member(members["cls"]).decode())
    values = json.loads(_read_member(members["json"])) if "json" in members else {}
    return label_named(values.get(roles_of([*values]).get("label", "cls")))


def _read_member(item: tuple[str, int, int]) -> bytes:
    path, offset, size = item
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(size)
