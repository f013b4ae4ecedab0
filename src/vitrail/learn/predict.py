"""Answers for any number of pictures, written while they come, in the order in which they were given."""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
from torch import Tensor

from vitrail.data.batches import Batch
from vitrail.data.readers.found import expanded, need, readable
from vitrail.data.sources import from_files
from vitrail.learn.evaluate import class_names, once
from vitrail.learn.processes import Processes, gathered, processes
from vitrail.learn.progress import followed
from vitrail.models import Model
from vitrail.weights import load
from vitrail.words import nearest

COLUMNS = ("path", "label", "confidence", "top", "error")
NO_NUMBER = "the model answers with no number; its weights are damaged, or its training went wrong"
ROW_GROUP = 10_000  # rows that a Parquet file keeps together

Row = dict[str, Any]
Write = Callable[[Sequence[Row]], None]


class Chunk(NamedTuple):
    """The likeliest classes of some pictures, small enough to keep for millions."""

    index: Tensor  # type: ignore[assignment]  # (pictures,); hides the method of tuples
    chances: Tensor  # (pictures, top), falling
    classes: Tensor  # (pictures, top)


def predict(
    source: str,
    pictures: Iterable[str | os.PathLike[str]],
    out: str = "-",
    *,
    top: int = 5,
    batch: int = 64,
    workers: int | None = None,
    device: str = "auto",
) -> int:
    """Writes a row for each picture, and returns how many could not be read.

    source: a run folder, or anything that vitrail.load reads. pictures: files, and folders of them.
    out: a file .csv, .jsonl or .parquet; "-" prints CSV. A row has the columns path, label, confidence,
    top (the likeliest classes, each with its confidence) and error, which says why there is no answer.
    batch: pictures at a time in each process. device: as processes takes it. Under torchrun the first
    process writes.
    """
    if Path(out).is_dir():
        raise ValueError(f"{out} is a folder; give the name of a file, such as {Path(out) / 'answers.csv'}")
    ending = ".csv" if out == "-" else Path(out).suffix.lower()
    if ending not in WRITERS:
        raise ValueError(f"{out} cannot be written: its ending is {ending!r}; {nearest(ending, WRITERS)}")
    paths = expanded(pictures)
    if not paths:
        raise ValueError("there is nothing to predict; name picture files, or folders of them")
    with processes(device) as here:
        model = load(source, dtype=torch.float32).to(here.device)
        labels = class_names(model, source)
        loader = once(from_files(paths), model, here, batch=batch, workers=workers)
        batches = loader.epoch() if out == "-" else followed(loader, "picture")
        chunks = _in_order(_chunks(model, batches, min(top, len(labels)), loader.bad), loader.bad, here)
        if here.first:
            Path(out).parent.mkdir(parents=True, exist_ok=True)
            with WRITERS[ending](out) as write:
                for rows in _rows(chunks, loader.bad, paths, labels):
                    write(rows)
        else:
            list(chunks)
    return len(loader.bad)


def _chunks(model: Model, batches: Iterable[Batch], top: int, bad: dict[int, str]) -> Iterator[Chunk]:
    """The answers batch by batch; pictures that get none that is a number join the bad ones."""
    for batch in batches:
        if len(batch.index):
            with torch.inference_mode():
                best = model(batch.images).float().softmax(1).topk(top)
            sound = ~best.values.isnan().any(1).cpu()
            bad |= dict.fromkeys(batch.index[~sound].tolist(), NO_NUMBER)
            yield Chunk(batch.index[sound], best.values.cpu()[sound], best.indices.cpu()[sound])


def _in_order(own: Iterator[Chunk], bad: dict[int, str], here: Processes) -> Iterator[Chunk]:
    """In the first process its own chunks as they come, then the others'; `bad` becomes everyone's."""
    if here.first:
        yield from own
    for chunks, theirs in gathered((list(own), bad.copy()), here):
        bad |= theirs
        yield from chunks


def _rows(
    chunks: Iterable[Chunk], bad: Mapping[int, str], paths: Sequence[str], labels: Sequence[str]
) -> Iterator[list[Row]]:
    """A row for each path, in order: what no chunk has an answer for is bad."""

    def unread(start: int, stop: int) -> list[Row]:
        return [_row(paths[index], [], bad[index]) for index in range(start, stop)]

    told = 0
    for chunk in chunks:
        rows = []
        for index, *answer in zip(*(column.tolist() for column in chunk), strict=True):
            rows += unread(told, index)
            best = [
                {"label": labels[label], "confidence": round(chance, 6)}
                for chance, label in zip(*answer, strict=True)
            ]
            rows.append(_row(paths[index], best, None))
            told = index + 1
        yield rows
    yield unread(told, len(paths))


def _row(path: str, best: list[dict[str, Any]], error: str | None) -> Row:
    first = best[0] if best else {"label": None, "confidence": None}
    return {"path": readable(path), **first, "top": best, "error": error}


def _opened(out: str) -> AbstractContextManager[TextIO]:
    return nullcontext(sys.stdout) if out == "-" else open(out, "w", encoding="utf-8", newline="")


@contextmanager
def _csv(out: str) -> Iterator[Write]:
    with _opened(out) as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()

        def write(rows: Sequence[Row]) -> None:
            table.writerows({**row, "top": json.dumps(row["top"], ensure_ascii=False)} for row in rows)
            file.flush()

        yield write


@contextmanager
def _jsonl(out: str) -> Iterator[Write]:
    with _opened(out) as file:

        def write(rows: Sequence[Row]) -> None:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            file.flush()

        yield write


@contextmanager
def _parquet(out: str) -> Iterator[Write]:
    arrow, parquet = (need(name, f"writing {out}") for name in ("pyarrow", "pyarrow.parquet"))
    chance = arrow.struct([("label", arrow.string()), ("confidence", arrow.float64())])
    kinds = (arrow.string(), arrow.string(), arrow.float64(), arrow.list_(chance), arrow.string())
    schema = arrow.schema(list(zip(COLUMNS, kinds, strict=True)))
    waiting: list[Row] = []
    with parquet.ParquetWriter(out, schema) as file:

        def flush() -> None:
            file.write_table(arrow.Table.from_pylist(waiting, schema))
            waiting.clear()

        def write(rows: Sequence[Row]) -> None:
            waiting.extend(rows)
            if len(waiting) >= ROW_GROUP:
                flush()

        try:
            yield write
        finally:  # whatever ended it, what was answered is kept
            flush()


# The ending of a file → what opens it for rows.
WRITERS: dict[str, Callable[[str], AbstractContextManager[Write]]] = {
    ".csv": _csv,
    ".jsonl": _jsonl,
    ".parquet": _parquet,
}
