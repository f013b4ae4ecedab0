"""Large photos made small for a model: Pillow against simplejpeg (TurboJPEG), threads against processes.

    python benchmarks/decode.py [SIDE]

A hundred JPEG files of 3000x2000 pixels, drawn, are decoded at a fraction of their size and resized to
SIDE x SIDE, 224 by default. Each way is run three times; the median counts. Needs simplejpeg.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from io import BytesIO

import numpy as np
import PIL
import simplejpeg
from PIL import Image

from vitrail.data.pictures import open_picture

COUNT, REPEATS = 100, 3


def photo() -> bytes:
    """A photo-like JPEG: smooth shapes with some grain."""
    draw = np.random.default_rng(0)
    coarse = Image.fromarray(draw.integers(0, 255, (20, 30, 3), dtype=np.uint8)).resize((3000, 2000))
    grain = draw.integers(-12, 12, (2000, 3000, 1))
    pixels = (np.asarray(coarse, np.int16) + grain).clip(0, 255).astype(np.uint8)
    Image.fromarray(pixels).save(file := BytesIO(), "JPEG", quality=90)
    return file.getvalue()


def by_pillow(data: bytes, side: int) -> tuple[int, ...]:
    """As training does it."""
    return np.asarray(open_picture(data, shortest=side).resize((side, side))).shape


def by_simplejpeg(data: bytes, side: int) -> tuple[int, ...]:
    """TurboJPEG's scaled decoding, resized by Pillow all the same."""
    pixels = simplejpeg.decode_jpeg(data, min_height=side, min_width=side)
    return np.asarray(Image.fromarray(pixels).resize((side, side))).shape


def rate(pool: Executor, decode: Callable[[bytes, int], tuple[int, ...]], data: bytes, side: int) -> float:
    """Photos per second, the median of a few runs, the first of which is not counted."""
    rates = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        for shape in pool.map(decode, [data] * COUNT, [side] * COUNT):
            assert shape == (side, side, 3)
        rates.append(COUNT / (time.perf_counter() - began))
    return statistics.median(rates[1:])


def main(side: int = 224) -> None:
    """Prints a line for each way."""
    cores = os.cpu_count() or 1
    data = photo()
    print(
        f"Pillow {PIL.__version__}, simplejpeg {simplejpeg.__version__}, {cores} cores, {len(data):,} bytes"
    )
    for kind in (ThreadPoolExecutor, ProcessPoolExecutor):
        for decode in (by_pillow, by_simplejpeg):
            with kind(cores) as pool:
                found = rate(pool, decode, data, side)
                print(f"{kind.__name__:<20} {decode.__name__:<14} {found:6.1f} photos/s", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
