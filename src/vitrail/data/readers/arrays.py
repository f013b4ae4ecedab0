"""Arrays: IDX files, .npz files, and the digits of scikit-learn."""

from __future__ import annotations

import gzip
import re
import zipfile
from pathlib import Path

import numpy as np

from vitrail.data.readers.found import Found, Rows, files_of, label_named, need, reading

# Arrays of an .npz file: split → names of pictures and labels.
ARRAYS = {
    "train": [("x_train", "y_train"), ("train_images", "train_labels"), ("images", "labels"), ("x", "y")],
    "val": [("x_val", "y_val"), ("val_images", "val_labels")],
    "test": [("x_test", "y_test"), ("test_images", "test_labels")],
}

IDX = ("*images*idx?-ubyte", "*images*idx?-ubyte.gz")

# The one kin of MNIST whose numbers have names: its folder, as its authors, torchvision and others call it.
FASHION = re.compile(r"fashion[-_ ]?mnist(/raw|/data/fashion)?$", re.IGNORECASE)
CLOTHES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)


def is_idx(place: Path) -> bool:
    """Whether there are the files of the MNIST family."""
    return place.is_dir() and bool(files_of(place, *IDX))


def read_idx(place: Path) -> Found:
    """Files called …-images-idx3-ubyte beside …-labels-idx1-ubyte, each perhaps with .gz."""
    names = CLOTHES if FASHION.search(place.resolve().as_posix()) else ()
    found = Found(classes=names)
    for split, path in files_of(place, *IDX):
        if path.suffix.lower() == ".gz" and path.with_suffix("").is_file():
            continue  # torchvision keeps what it downloaded beside what it unpacked
        labels = path.with_name(re.sub(r"idx\d", "idx1", path.name.replace("images", "labels")))
        if not labels.is_file():
            raise ValueError(f"{path} has no labels beside it; expected them in {labels.name}")
        if split in found.splits:
            raise ValueError(f"{path} is a second file of pictures for {split}; keep one set in a folder")
        with reading(labels):
            numbers = [label_named(number, names) for number in _idx_array(labels).tolist()]
        with reading(path):
            found.splits[split] = _array_rows(path.name, _idx_array(path), numbers)
    return found


def _idx_array(path: Path) -> np.ndarray:
    """Two zeros, the type (8: bytes), the number of dimensions, each of them in four bytes, the values."""
    data = path.read_bytes()
    if path.suffix.lower() == ".gz":
        data = gzip.decompress(data)
    if data[:3] != b"\0\0\x08":
        raise ValueError(
            f"it begins with the bytes {data[:4].hex(' ')}; expected 00 00 08, an IDX file of bytes"
        )
    header = 4 + 4 * int.from_bytes(data[3:4], "big")
    if len(data) < header:
        raise ValueError(f"it ends after {len(data)} bytes, before its header does")
    shape = np.frombuffer(data[4:header], ">u4")
    values = np.frombuffer(data[header:], np.uint8)
    if len(values) != shape.prod():
        raise ValueError(f"it holds {len(values):,} values; its header says {' x '.join(map(str, shape))}")
    return values.reshape(shape).copy()  # bytes cannot be written to, which tensors that share them expect


def is_npz(place: Path) -> bool:
    """Whether it is an .npz file."""
    return place.is_file() and place.suffix.lower() == ".npz"


def read_npz(place: Path) -> Found:
    """Arrays of pictures and of labels under one of the usual pairs of names."""
    found = Found()
    with reading(place):
        if not zipfile.is_zipfile(place):
            raise ValueError("it is damaged, or no archive of arrays as numpy.savez writes them")
        with np.load(place, allow_pickle=False) as arrays:
            for split, pairs in ARRAYS.items():
                for pictures, labels in pairs:
                    if split not in found.splits and pictures in arrays and labels in arrays:
                        numbers = [label_named(number) for number in arrays[labels].reshape(-1).tolist()]
                        found.splits[split] = _array_rows(place.name, arrays[pictures], numbers)
            if not found.splits:
                known = ", ".join("/".join(pair) for pairs in ARRAYS.values() for pair in pairs)
                raise ValueError(f"it holds the arrays {', '.join(arrays)}; expected pairs of: {known}")
    return found


def read_digits(place: Path) -> Found:
    """1,797 handwritten digits of 8x8 pixels from 0 to 16, which scikit-learn carries."""
    digits = need("sklearn.datasets", "the digits").load_digits()
    pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    return Found({"train": _array_rows("digits", pixels, list(map(str, digits.target)))})


def _array_rows(name: str, pixels: np.ndarray, labels: list[str | None]) -> Rows:
    """pixels: (pictures, height, width), or with channels last; or first, if only that can be meant."""
    if pixels.ndim == 4 and pixels.shape[1] in (1, 3) and pixels.shape[3] not in (1, 3):
        pixels = np.moveaxis(pixels, 1, 3)
    if pixels.ndim not in (3, 4) or len(pixels) != len(labels):
        raise ValueError(
            f"pictures are {pixels.shape}, labels are {len(labels):,}; expected (pictures, height, width) or "
            "(pictures, height, width, channels), and a label for each"
        )
    return Rows(np.ascontiguousarray(pixels), [f"{name}[{i}]" for i in range(len(labels))], labels)
