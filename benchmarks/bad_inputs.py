"""What the command line answers to bad input: a Markdown table of what was given, exit code and answer.

    python benchmarks/bad_inputs.py [WORD]

Each row writes its files into a folder of its own and runs the command there, beside twelve good pictures
each of cats and dogs, a short run on the built-in digits, and a model that only gives features. WORD: only
the rows whose name contains it. Exits with 1 if an answer is a traceback, or ends with another exit code
than it should.
"""

from __future__ import annotations

import gzip
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock
from PIL import Image

import vitrail

MEMORY = 16 * 2**30  # bytes of addresses that a command may ask for: the machine shall not swap
LETTERS = 400  # of an answer, in the table
TINY = (
    "batch=8 epochs=0.1 precision=float32 model=vit-ti/8 model.width=24 model.depth=1 model.heads=2 "
    "model.mlp_width=24 augment.layers=0 mixup=0 cutmix=0"
)
# How the lines begin that every run says, or every error of an option.
USUAL = ("of ", "preset ", "pictures ", "model ", "learning ", "run folder ", "measured ", "usage: ", 9 * " ")

LOCKED = None  # in place of content: a lock that another process holds
Files = Mapping[str, bytes | str | None]
NO_FILES: Files = {}


class Row(NamedTuple):
    """The words after `vitrail`, what lies in the folder, and the exit code to end with."""

    words: str
    files: Files = NO_FILES
    code: int = 2


def picture(number: int) -> bytes:
    """A JPEG file of noise, the same for the same number."""
    pixels = np.random.default_rng(number).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file := BytesIO(), "JPEG")
    return file.getvalue()


def pictures(folder: str, count: int, first: int = 0) -> Files:
    """So many files, all different."""
    return {f"{folder}/{number}.jpg": picture(first + number) for number in range(count)}


def bomb() -> bytes:
    """A small PNG file of 400 million pixels."""
    Image.new("1", (20_000, 20_000)).save(file := BytesIO(), "PNG")
    return file.getvalue()


def npz(**arrays: Any) -> bytes:
    """An archive of arrays."""
    np.savez(file := BytesIO(), **arrays)
    return file.getvalue()


def idx(array: np.ndarray) -> bytes:
    """A gzipped IDX file."""
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return gzip.compress(header + array.astype(np.uint8).tobytes())


NUMBERS, PIXELS = np.arange(20), np.zeros((20, 8, 8), np.uint8)
ARRAYS = npz(x_train=PIXELS, y_train=NUMBERS)
CATS_AND_DOGS = {**pictures("photos/cat", 12), **pictures("photos/dog", 12, 50)}
SPOILED = {
    "photos/cat/empty.jpg": b"",
    "photos/cat/cut.jpg": picture(0)[:600],
    "photos/dog/text.jpg": "no picture",
    "photos/dog/bomb.png": bomb(),
}
TWICE = {
    f"twice/{split}/{name}/{number}.jpg": picture(first + number)
    for split in ("train", "val")
    for name, first in (("cat", 0), ("dog", 50))
    for number in range(12)
}

ROWS = {
    # pictures
    "a misspelt folder": Row("train pohtos"),
    "pictures without folders of classes": Row("train flat", pictures("flat", 3)),
    "a single class": Row("train one", pictures("one/cat", 12)),
    "two pictures in all": Row("train two", {**pictures("two/cat", 1), **pictures("two/dog", 1, 50)}),
    "files that are empty, cut off, of text, and a bomb": Row(f"train photos {TINY} --dry-run", SPOILED, 0),
    "the same, and --strict": Row(f"train photos {TINY} --strict", SPOILED),
    "no file that is a picture": Row("train bad", {f"bad/{c}/{i}.jpg": "x" for c in "ab" for i in range(12)}),
    "the same pictures in train/ and val/": Row(f"train twice {TINY} --dry-run", TWICE, 0),
    # tables, arrays, archives
    "a table without the columns": Row("train a.csv", {"a.csv": "name,kind\na.jpg,cat\n"}),
    "a table in UTF-16": Row("train a.csv", {"a.csv": "path,label\na.jpg,cat\n".encode("utf-16")}),
    "a table of files that are not there": Row(
        "train a.csv", {"a.csv": "path,label" + "\na.jpg,a\nb.jpg,b" * 6}
    ),
    "a damaged Parquet file": Row("train a.parquet", {"a.parquet": b"PAR1 nothing PAR1"}),
    "an .npz that is cut off": Row("train a.npz", {"a.npz": ARRAYS[:900]}),
    "an .npz with four wrong bytes": Row("train a.npz", {"a.npz": ARRAYS[:500] + b"abcd" + ARRAYS[504:]}),
    "an .npz of normalised pictures": Row("train a.npz", {"a.npz": npz(x=PIXELS - 2.5, y=NUMBERS % 2)}),
    "IDX files without labels": Row("train idx", {"idx/train-images-idx3-ubyte.gz": idx(PIXELS)}),
    "IDX labels beyond the ten names": Row(
        "train fashion-mnist",
        {
            "fashion-mnist/train-images-idx3-ubyte.gz": idx(PIXELS),
            "fashion-mnist/train-labels-idx1-ubyte.gz": idx(NUMBERS),
        },
    ),
    "datasets' state.json, empty": Row("train saved", {"saved/state.json": "{}"}),
    # recipes
    "a misspelt field": Row("train photos epoch=3"),
    "a misspelt model": Row("train photos model=vit-tny/4"),
    "endless epochs": Row("train photos epochs=inf"),
    "heads that do not divide the width": Row("train photos model.width=100"),
    "a million threads": Row("train photos workers=1000000"),
    "a recipe that is no TOML": Row("train my.toml", {"my.toml": "epochs = = 3"}),
    "a model larger than memory": Row(f"train photos {TINY} model.width=200000"),
    "a batch larger than memory": Row(f"train photos {TINY} batch=1000000"),
    # runs
    "--resume without a run": Row("train --resume"),
    "--resume with no whole state": Row(
        "train --resume --out run", {"run/resume-0.safetensors": b"torn", "run/resume-1.safetensors": b""}
    ),
    "--resume as another model": Row("train --resume --out run model.width=48"),
    "a run folder that another run writes to": Row("train photos --out busy", {"busy/.lock": LOCKED}),
    "a run folder that holds a run": Row("train photos --out run"),
    "a run folder that is a file": Row("train photos --out file", {"file": ""}),
    # weights
    "weights that are cut off": Row(
        "train photos --from run", {"run/best/model.safetensors": b"\x10\0\0\0\0\0\0\0{}"}
    ),
    "weights that are nowhere": Row("train photos --from ./nowhere"),
    "a teacher of other classes": Row(f"train photos {TINY} objective=distil-hard teacher=run"),
    "the ending of another form": Row("convert run copy.npz --to transformers"),
    # judging
    "pictures of classes unknown to the model": Row("evaluate run photos"),
    "a model without classes": Row("evaluate features photos"),
    "a run whose data.json is damaged": Row("evaluate run", {"run/data.json": "{"}),
    "a report in the place of a folder": Row("evaluate run --report photos"),
    "a picture that is not there": Row("predict run gone.jpg"),
    "a table that cannot be written": Row("predict run photos --out answers.xlsx"),
    "batches of no pictures": Row("predict run photos --batch 0"),
    "a single class to probe with": Row("probe features one", pictures("one/cat", 12)),
}


def write(place: Path, files: Files, stack: ExitStack) -> None:
    """Files by their names, and locks that last as long as the stack."""
    for name, content in files.items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is LOCKED:
            stack.enter_context(FileLock(path))
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content)


def answer(words: str, here: Path) -> tuple[int, str]:
    """The exit code of a command in a folder, and all that it says."""
    command = [sys.executable, "-m", "vitrail", *words.split()]
    done = subprocess.run(command, cwd=here, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout.replace(f"{here}/", "")


def tried(row: Row, good: Path) -> tuple[int, str]:
    """What a row is answered, in a copy of the good folder."""
    with tempfile.TemporaryDirectory() as space, ExitStack() as stack:
        here = Path(space) / "here"
        shutil.copytree(good, here)
        write(here, row.files, stack)
        return answer(row.words, here)


def shortened(said: str) -> str:
    """An answer for a cell of the table: without usual lines, of lists only the beginning."""
    text = "\n".join(line for line in said.splitlines() if not line.startswith(USUAL))
    text = re.sub(r"(one of:(?: [^,]+,){3}) .*", r"\1 …", text)
    text = re.sub(r"((?:^  .*\n){2})(?:^  .*\n?)+", r"\1  …\n", text, flags=re.MULTILINE)
    if len(text) > LETTERS:
        text = text[:LETTERS].rsplit(" ", 1)[0] + " …"
    return text.strip().replace("|", "\\|").replace("\n", "<br>")


def main(word: str = "") -> int:
    """Prints the table; 1 if an answer is not as it should be."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))  # of what it starts, too
    rows = {name: row for name, row in ROWS.items() if word in name}
    wrong = 0
    with tempfile.TemporaryDirectory() as space, ExitStack() as stack:
        good = Path(space)
        write(good, CATS_AND_DOGS, stack)
        features = vitrail.create("vit-ti/4", width=24, depth=1, heads=2, classes=0, image_size=8)
        vitrail.save(features, good / "features")
        code, said = answer(f"train {TINY} --out run", good)
        if code:
            raise SystemExit(f"the good run ended with {code}:\n{said}")
        print("| what was given | command | exit code | answer |\n|---|---|---|---|")
        with ThreadPoolExecutor(2) as pool:
            answers = pool.map(lambda row: tried(row, good), rows.values())
            for (name, row), (code, said) in zip(rows.items(), answers, strict=True):
                right = code == row.code and "Traceback" not in said
                wrong += not right
                command = row.words.replace(TINY, "…")
                verdict = code if right else f"{code}, WRONG"
                print(f"| {name} | `{command}` | {verdict} | {shortened(said)} |", flush=True)
    print(f"\n{len(rows)} bad inputs, {wrong} of them answered badly")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
