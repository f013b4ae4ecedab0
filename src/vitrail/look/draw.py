"""Pictures of attention: a map over the picture it looks at, and sheets of several."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

# From little to much: dark violet, magenta, orange, pale yellow; even steps of lightness, so that the
# order survives in grey and for colour-blind eyes.
COLOURS = np.array([(20, 11, 52), (132, 32, 107), (229, 92, 48), (246, 215, 70), (252, 255, 164)])


def colour(values: np.ndarray) -> np.ndarray:
    """Values from 0 to 1, of any shape, as colours: the same shape with 3 at the end, uint8."""
    steps = np.linspace(0, 1, len(COLOURS))
    channels = [np.interp(values, steps, COLOURS[:, channel]) for channel in range(3)]
    return np.stack(channels, -1).astype(np.uint8)


CLIPPED = 0.05  # of the cells at either end: a few corners that take most of it hide all the rest


def stretched(seen: Tensor) -> Tensor:
    """A map (rows, columns) scaled to 0 to 1, but for its few greatest and least; a flat one is 0."""
    if seen.ndim != 2:
        raise ValueError(
            f"a map is (rows, columns), got {tuple(seen.shape)}; of (batch, heads, rows, columns) take "
            "one picture and the mean of its heads: map[0].mean(0)"
        )
    seen = seen.detach().float().cpu()
    low, high = seen.flatten().quantile(torch.tensor([CLIPPED, 1 - CLIPPED]))
    return ((seen - low) / (high - low)).clamp(0, 1) if high > low else torch.zeros_like(seen)


def overlay(
    picture: Image.Image, seen: Tensor, *, patch: tuple[int, int] | None = None, strength: float = 0.6
) -> Image.Image:
    """A map (rows, columns) over the picture that the model was given: preprocess.picture(input).

    patch: height and width of one cell in pixels of the picture, where cells do not fill it: the last ones
    reach beyond its edge, or leave a rest that is not covered. Without it they fill the picture.
    """
    whole = picture.convert("RGB")
    grey = Image.fromarray((stretched(seen).numpy() * 255).astype(np.uint8))
    size = (grey.width * patch[1], grey.height * patch[0]) if patch else whole.size
    covered = (0, 0, min(size[0], whole.width), min(size[1], whole.height))
    soft = grey.resize(size, Image.Resampling.BICUBIC).crop(covered)
    coloured = Image.fromarray(colour(np.asarray(soft) / 255))
    whole.paste(Image.blend(whole.crop(covered), coloured, strength))
    return whole


def sheet(title: str, pictures: Sequence[tuple[str, Image.Image]]) -> Image.Image:
    """A title, and captioned pictures of one size below it, in rows that leave the fewest holes."""
    columns = min(range(4, 8), key=lambda count: (-len(pictures) % count, count))
    width, height = pictures[0][1].size
    letters = max(12, width // 16)
    font = ImageFont.load_default(size=letters)
    line = letters * 3 // 2
    rows = -(-len(pictures) // columns)
    whole = Image.new("RGB", (columns * (width + 8) + 8, 2 * line + rows * (height + line + 8)), "white")
    pen = ImageDraw.Draw(whole)
    pen.text((8, letters // 2), title, fill="black", font=font)
    for index, (caption, picture) in enumerate(pictures):
        left = 8 + index % columns * (width + 8)
        top = 2 * line + index // columns * (height + line + 8)
        pen.text((left, top + letters // 6), caption, fill="black", font=font)
        whole.paste(picture, (left, top + line))
    return whole


def as_text(seen: Tensor) -> list[str]:
    """A map (rows, columns) as lines of text, two characters a cell, fuller where more is seen."""
    shades = " ░▒▓█"
    steps = (stretched(seen) * (len(shades) - 1)).round().int()
    return ["".join(shades[step] * 2 for step in row) for row in steps.tolist()]
