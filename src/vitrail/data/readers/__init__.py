"""One small reader for each kind of place that labelled pictures come in, and the table of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from vitrail.data.readers import arrays, folders, shards, tables
from vitrail.data.readers.found import Found


class Kind(NamedTuple):
    """What a place of this kind looks like to a person, how to tell it, and its reader."""

    what: str
    fits: Callable[[Path], bool]
    read: Callable[[Path], Found]


KINDS = (
    Kind("a folder written by datasets.save_to_disk", tables.is_hugging_face, tables.read_hugging_face),
    Kind(
        "a table (.csv or .parquet, or a folder of them) with the columns path, label and perhaps split",
        tables.is_table,
        tables.read_tables,
    ),
    Kind("a folder of IDX files (train-images-idx3-ubyte …, .gz too)", arrays.is_idx, arrays.read_idx),
    Kind("an .npz file of x_train, y_train …, or images, labels", arrays.is_npz, arrays.read_npz),
    Kind("tar shards (key.jpg beside key.cls or key.json)", shards.is_shards, shards.read_shards),
    Kind(
        "a folder with a folder of pictures for each class, in train/, val/ and test/ or not",
        folders.has_class_folders,
        folders.read_folders,
    ),
)

# What comes by a name, whatever folders there are; ./digits is a folder.
NAMED = {
    "digits": Kind(
        '"digits": handwritten digits that scikit-learn carries', lambda _: True, arrays.read_digits
    )
}
