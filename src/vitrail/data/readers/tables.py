"""Tables: CSV, Parquet, and the Arrow files of Hugging Face datasets."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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

TABLES = ("*.csv", "*.tsv", "*.parquet")


class Table(NamedTuple):
    """The names of all columns; and if there are pictures and labels, the columns by what they hold.

    A picture is given as a path or, in an Arrow table, as a cell with its bytes. classes: the names of
    the classes, where labels are their numbers.
    """

    header: Sequence[str]
    columns: Mapping[str, Sequence[Any]]
    classes: tuple[str, ...] = ()


def is_table(place: Path) -> bool:
    """Whether there are tables."""
    return bool(files_of(place, *TABLES))


def read_tables(place: Path) -> Found:
    """CSV and Parquet files; the name of each says its split unless a column does."""
    return _gathered(files_of(place, *TABLES))


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
            (split, folder / file)
            for folder, split in splits.items()
            for file in _listed(folder / "state.json", "_data_files", itemgetter("filename"))
        ]
    )


def _listed(path: Path, key: str, name: Callable[[Any], str]) -> list[str]:
    """The names in a list that a JSON file has under a key."""
    try:
        return [name(each) for each in json.loads(path.read_text(encoding="utf-8"))[key]]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged: expected what datasets.save_to_disk writes, JSON with a list of {key!r}"
        ) from error


def _gathered(files: Sequence[tuple[str, Path]]) -> Found:
    """The rows of all tables, given as (split, file), that have columns of pictures and of labels."""
    found = Found(read=_read_cell)
    twice: set[str] = set()
    for split, path in files:
        with reading(path):
            table = (_csv if path.suffix.lower() in (".csv", ".tsv") else _arrow)(path)
            labels = [label_named(value, table.classes) for value in table.columns.get("label", ())]
        if not table.columns:
            found.notes.append(
                f"{path} is passed over: it has the columns {', '.join(table.header) or '(none)'}; expected "
                "path (or image), label, and split if it holds more than one"
            )
            continue
        found.classes = tuple(dict.fromkeys((*found.classes, *table.classes)))
        twice |= {name for name, times in Counter(table.classes).items() if times > 1}
        splits = [str(name).strip().lower() for name in table.columns.get("split", [split] * len(labels))]
        if unknown := set(splits) - SPLITS.keys():
            raise ValueError(f"{path} has the splits {sorted(unknown)}; expected train, val and test")
        rows = zip(table.columns["picture"], labels, splits, strict=True)
        for number, (item, label, name) in enumerate(rows):
            found.add(SPLITS[name], item, item if isinstance(item, str) else f"{path}[{number}]", label)
    if twice:
        found.notes.append(f"classes of the same name count as one: {', '.join(sorted(twice))}")
    return found


def _csv(path: Path) -> Table:
    with path.open(encoding="utf-8-sig", newline="") as file:
        delimiter = max(",;\t", key=file.readline().count)
        file.seek(0)
        lines = csv.reader(file, delimiter=delimiter)
        header = next(lines, [])
        roles = _roles(header)
        rows = [row for row in lines if row] if roles else []
    for row in rows:
        if len(row) != len(header):
            raise ValueError(f"{delimiter.join(row)!r} is not one value each of {', '.join(header)}")
    columns = {role: [row[header.index(name)] for row in rows] for role, name in roles.items()}
    if columns:
        columns["picture"] = _paths(path, columns["picture"])
    return Table(header, columns)


def _arrow(path: Path) -> Table:
    """A Parquet file, or a stream of Arrow as datasets writes it, which is mapped into memory."""
    arrow = need("pyarrow", f"reading {path.name}")
    if path.suffix.lower() == ".parquet":
        file = need("pyarrow.parquet", path.name).ParquetFile(path)
        schema, read = file.schema_arrow, file.read
    else:
        file = arrow.ipc.open_stream(arrow.memory_map(str(path)))
        schema, read = file.schema, lambda names: file.read_all().select(names)
    roles = _roles(schema.names)
    if not roles:
        return Table(schema.names, {})
    types = arrow.types
    holders = (types.is_struct, types.is_binary, types.is_large_binary)
    roles |= roles_of([field.name for field in schema if any(holds(field.type) for holds in holders)])
    table = read([*roles.values()])
    columns = {role: table[name].to_pylist() for role, name in roles.items() if role != "picture"}
    columns["picture"] = _pictures(path, table[roles["picture"]])
    features = json.loads((schema.metadata or {}).get(b"huggingface", "{}"))
    label = features.get("info", {}).get("features", {}).get(roles["label"], {})
    return Table(schema.names, columns, tuple(label.get("names", ())))


def _roles(header: Sequence[str]) -> dict[str, str]:
    """As `roles_of`; nothing unless there are both pictures and labels."""
    roles = roles_of(header)
    return roles if {"picture", "label"} <= roles.keys() else {}


def _pictures(path: Path, column: Any) -> Sequence[Any]:
    """For each picture the path of its file, or a cell with its bytes, which may lie on the disk."""
    types, compute = need("pyarrow.types", path.name), need("pyarrow.compute", path.name)
    kind = column.type.value_type if types.is_dictionary(column.type) else column.type
    if types.is_string(kind) or types.is_large_string(kind):
        return _paths(path, column.to_pylist())
    if not types.is_struct(kind):
        return column
    held = compute.struct_field(column, "bytes").is_valid().to_pylist()
    paths = _paths(path, compute.struct_field(column, "path").to_pylist())
    return [cell if has else file for cell, has, file in zip(column, held, paths, strict=True)]


def _paths(table: Path, names: Sequence[str | None]) -> list[str]:
    """From here, what a table names from its own folder."""
    return [str(table.parent / (name or "")) for name in names]


def _read_cell(item: Any) -> bytes:
    """The bytes of a file by its path, or those in a cell of an Arrow table."""
    if isinstance(item, str):
        return read_file(item)
    value = item.as_py()
    return (value["bytes"] if isinstance(value, dict) else value) or b""
