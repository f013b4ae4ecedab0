"""Tables: CSV, Parquet, and the Arrow files of Hugging Face datasets."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from vitrail.data.readers.found import (
    SPLITS,
    Found,
    files_of,
    label_named,
    need,
    read_file,
    reading,
    roles_of,
    split_named,
)


class Table(NamedTuple):
    """Columns by what they hold, the split they belong to unless one says so, the names of the classes.

    A picture is given as a path or, in an Arrow table, as a cell with its bytes.
    """

    path: Path
    split: str
    columns: dict[str, Sequence[Any]]
    classes: tuple[str, ...] = ()


def is_table(place: Path) -> bool:
    """Whether it is a table, or a folder of tables with a column of pictures and one of labels."""
    texts = files_of(place, "*.csv", "*.tsv")
    if _parquet_files(place) or place in texts:
        return True
    return bool(texts) and {"picture", "label"} <= roles_of(_csv_header(texts[0])[0]).keys()


def read_tables(place: Path) -> Found:
    """CSV and Parquet files; the name of each says its split unless a column does."""
    texts = [_csv(path) for path in files_of(place, "*.csv", "*.tsv")]
    return _gathered([*texts, *(_arrow(path, split_named(path.stem)) for path in _parquet_files(place))])


def is_hugging_face(place: Path) -> bool:
    """Whether `save_to_disk` of the library datasets wrote this folder."""
    return any((place / name).is_file() for name in ("dataset_dict.json", "state.json"))


def read_hugging_face(place: Path) -> Found:
    """The Arrow files of one split, or of all of them."""
    splits = {place: "train"}
    if (place / "dataset_dict.json").is_file():
        names = _listed(place / "dataset_dict.json", "splits", str)
        splits = {place / name: split_named(name) for name in names}
    return _gathered(
        [
            _arrow(folder / file, split)
            for folder, split in splits.items()
            for file in _listed(folder / "state.json", "_data_files", itemgetter("filename"))
        ]
    )


def _parquet_files(place: Path) -> list[Path]:
    return files_of(place, "*.parquet") or files_of(place / "data", "*.parquet")


def _listed(path: Path, key: str, name: Callable[[Any], str]) -> list[str]:
    """The names in a list that a JSON file has under a key."""
    try:
        return [name(each) for each in json.loads(path.read_text(encoding="utf-8"))[key]]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged: expected what datasets.save_to_disk writes, JSON with a list of {key!r}"
        ) from error


def _csv_header(path: Path) -> tuple[list[str], str]:
    """The names of the columns, and what stands between them."""
    with reading(path), path.open(encoding="utf-8-sig", newline="") as file:
        line = file.readline()
        delimiter = max(",;\t", key=line.count)
        return next(csv.reader([line], delimiter=delimiter), []), delimiter


def _csv(path: Path) -> Table:
    header, delimiter = _csv_header(path)
    with reading(path), path.open(encoding="utf-8-sig", newline="") as file:
        roles = _expected_roles(header)
        rows = [row for row in csv.reader(file, delimiter=delimiter) if row][1:]
        for row in rows:
            if len(row) != len(header):
                raise ValueError(f"{delimiter.join(row)!r} is not one value each of {', '.join(header)}")
    columns: dict[str, Sequence[Any]] = {
        role: [row[header.index(name)] for row in rows] for role, name in roles.items()
    }
    columns["picture"] = [str(path.parent / name) for name in columns["picture"]]
    return Table(path, split_named(path.stem), columns)


def _arrow(path: Path, split: str) -> Table:
    """A Parquet file, or a stream of Arrow as datasets writes it, which is mapped into memory."""
    arrow = need("pyarrow", f"reading {path.name}")
    with reading(path):
        if path.suffix == ".parquet":
            table = need("pyarrow.parquet", path.name).read_table(path)
        else:
            table = arrow.ipc.open_stream(arrow.memory_map(str(path))).read_all()
        roles = _expected_roles(table.column_names)
        columns = {role: table[name] for role, name in roles.items()}
        for role, column in columns.items():
            if role != "picture":
                columns[role] = column.to_pylist()
            elif arrow.types.is_string(column.type) or arrow.types.is_large_string(column.type):
                columns[role] = [str(path.parent / name) for name in column.to_pylist()]
        features = json.loads((table.schema.metadata or {}).get(b"huggingface", "{}"))
        label = features.get("info", {}).get("features", {}).get(roles["label"], {})
        return Table(path, split, columns, tuple(label.get("names", ())))


def _expected_roles(header: Sequence[str]) -> dict[str, str]:
    roles = roles_of(header)
    if not {"picture", "label"} <= roles.keys():
        raise ValueError(
            f"it has the columns {', '.join(header) or '(none)'}; expected path (or image), label, and split "
            "if it holds more than one"
        )
    return roles


def _gathered(tables: Sequence[Table]) -> Found:
    found = Found(read=_read_cell, classes=tables[0].classes if tables else ())
    for table in tables:
        pictures = table.columns["picture"]
        with reading(table.path):
            labels = [label_named(value, table.classes) for value in table.columns["label"]]
        splits = [
            str(split).strip().lower() for split in table.columns.get("split", [table.split] * len(labels))
        ]
        if unknown := set(splits) - SPLITS.keys():
            raise ValueError(f"{table.path} has the splits {sorted(unknown)}; expected train, val and test")
        for number, (item, label, split) in enumerate(zip(pictures, labels, splits, strict=True)):
            name = item if isinstance(item, str) else f"{table.path}[{number}]"
            found.add(SPLITS[split], item, name, label)
    return found


def _read_cell(item: Any) -> bytes:
    """The bytes of a file by its path, or those in a cell of an Arrow table."""
    if isinstance(item, str):
        return read_file(item)
    value = item.as_py()
    return (value["bytes"] if isinstance(value, dict) else value) or b""
