"""Training pictures varied at random, a batch at a time, every picture in its own way.

All that is random is one row of numbers from 0 to 1 for each picture, so that a part of a batch is varied
as the whole would be. Whatever moves pixels (crop, flip, rotation, shear, shift) is one affine map, and the
pixels are interpolated once. Outside of a picture lies its mirror image: no black corners to learn from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# What each picture draws, before the operation and the direction of each layer of RandAugment.
COLUMNS = (
    *("area", "ratio", "x", "y", "flip"),
    *("erase", "erase_area", "erase_ratio", "erase_x", "erase_y", "red", "green", "blue"),
)

# A rectangle of random erasing: its part of the area, its height to its width (Zhong et al. 2020).
ERASED_AREA = (0.02, 1 / 3)
ERASED_RATIO = (0.3, 1 / 0.3)


@dataclass(frozen=True)
class Augment:
    """What may happen to a training picture; the defaults are strong, for learning from little.

    scale: the part of the picture's area that a crop shows, from and to. What would not fit is
        made smaller.
    ratio: width to height of a crop, beside the model's own, from and to.
    pad_crop: instead of such crops, the whole picture, shifted by up to so many pixels each way.
    flip: how often left and right change places.
    layers: how many operations of RandAugment (Cubuk et al. 2020) follow each other.
    magnitude: their strength, from 0 to 1; theirs counts to 30, so that their 9 is 0.3.
    erase: how often a rectangle is painted over with one colour.
    """

    scale: tuple[float, float] = (0.35, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    pad_crop: int = 0
    flip: float = 0.5
    layers: int = 2
    magnitude: float = 0.3
    erase: float = 0.25

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        for name, right, expected in (
            ("scale", 0 < self.scale[0] <= self.scale[1] <= 1, "two numbers up to 1, the lower first"),
            ("ratio", 0 < self.ratio[0] <= self.ratio[1], "two positive numbers, the lower first"),
            ("pad_crop", self.pad_crop >= 0, "pixels, or 0"),
            ("flip", 0 <= self.flip <= 1, "a number from 0 to 1"),
            ("layers", self.layers >= 0, "a number of operations, or 0"),
            ("magnitude", 0 <= self.magnitude <= 1, "a number from 0 to 1"),
            ("erase", 0 <= self.erase <= 1, "a number from 0 to 1"),
        ):
            if not right:
                raise ValueError(f"{name} is {getattr(self, name)}; expected {expected}")

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """The random numbers for so many pictures, (pictures, columns)."""
        return torch.rand(count, len(COLUMNS) + 2 * self.layers, generator=generator)

    def __call__(self, pixels: Tensor, draws: Tensor, size: tuple[int, int], aspect: Tensor) -> Tensor:
        """Varied pictures (batch, channels, *size), float32 from 0 to 255.

        pixels: (batch, channels, height, width) uint8, whole pictures, stretched however they are kept.
        aspect: (batch,), width to height of the pictures as they were.
        """
        draws = draws.to(pixels.device)
        named = dict(zip(COLUMNS, draws.unbind(1), strict=False))
        steps = draws[:, len(COLUMNS) :].view(len(draws), self.layers, 2)
        operations = (steps[..., 0] * len(OPERATIONS)).long()  # (batch, layers)
        amounts = torch.where(steps[..., 1] < 0.5, -self.magnitude, self.magnitude)
        moves = {
            name: (amounts * (operations == OPERATIONS.index(name))).sum(1) * strongest
            for name, strongest in MOVES.items()
        }
        images = warp(pixels, self.map(named, moves, size, aspect.to(pixels.device)), size)
        for layer in range(self.layers):
            for name, change in COLOURS.items():
                rows = (operations[:, layer] == OPERATIONS.index(name)).nonzero()[:, 0]
                if len(rows):
                    images[rows] = change(images[rows], amounts[rows, layer, None, None, None])
        return self._erased(images, named)

    def map(
        self,
        draws: Mapping[str, Tensor],
        moves: Mapping[str, Tensor],
        size: tuple[int, int],
        aspect: Tensor,
    ) -> Tensor:
        """Where in the picture each place of the result comes from: (batch, 2, 3), from x, y, 1 to x, y.

        Both sides of both pictures run from -1 to 1. moves: what `MOVES` names, each (batch,).
        """
        height, width = size
        if self.pad_crop:
            wide = tall = torch.ones_like(aspect)
            choices = 2 * self.pad_crop + 1
            x = ((draws["x"] * choices).floor() - self.pad_crop) * 2 / width
            y = ((draws["y"] * choices).floor() - self.pad_crop) * 2 / height
        else:
            area = _between(draws["area"], *self.scale)
            ratio = _between(draws["ratio"], *map(math.log, self.ratio)).exp() * width / height / aspect
            wide, tall = (area * ratio).sqrt(), (area / ratio).sqrt()  # parts of the picture's sides
            fit = torch.maximum(wide, tall).clamp(min=1)
            wide, tall = wide / fit, tall / fit
            x, y = (2 * draws["x"] - 1) * (1 - wide), (2 * draws["y"] - 1) * (1 - tall)
        mirror = torch.where(draws["flip"] < self.flip, -1.0, 1.0)
        cos, sin = moves["rotate"].cos(), moves["rotate"].sin()
        shear_x, shear_y = moves["shear_x"], moves["shear_y"]
        square = width / height  # angles are those of a plane in which pixels are square
        map_x = [(cos - sin * shear_y) * mirror, (cos * shear_x - sin) / square, moves["shift_x"]]
        map_y = [(sin + cos * shear_y) * mirror * square, cos + sin * shear_x, moves["shift_y"]]
        rows = torch.stack([torch.stack(map_x, -1), torch.stack(map_y, -1)], 1)
        rows = rows * torch.stack([wide, tall], -1)[:, :, None]
        return torch.cat([rows[..., :2], rows[..., 2:] + torch.stack([x, y], -1)[:, :, None]], -1)

    def _erased(self, images: Tensor, draws: Mapping[str, Tensor]) -> Tensor:
        """Paints over a rectangle in some of the pictures, in place."""
        rows = (draws["erase"] < self.erase).nonzero()[:, 0]
        area = _between(draws["erase_area"][rows], *ERASED_AREA)
        ratio = _between(draws["erase_ratio"][rows], *map(math.log, ERASED_RATIO)).exp()
        down = _stretch((area * ratio).sqrt(), draws["erase_y"][rows], images.shape[2])
        across = _stretch((area / ratio).sqrt(), draws["erase_x"][rows], images.shape[3])
        inside = down[:, None, :, None] & across[:, None, None, :]
        colour = torch.stack([draws[name][rows] for name in ("red", "green", "blue")], 1) * 255
        images[rows] = torch.where(inside, colour[:, : images.shape[1], None, None], images[rows])
        return images


def warp(pixels: Tensor, maps: Tensor, size: tuple[int, int]) -> Tensor:
    """Pictures seen through affine maps, bilinear: (batch, channels, *size) float32.

    maps: (batch, 2, 3), from places (x, y, 1) of the result to places (x, y) of pixels.
    """
    y, x = ((torch.arange(n, device=pixels.device) * 2 + 1) / n - 1 for n in size)
    across = x[:, None] * maps[:, None, :, 0]  # (batch, width, 2)
    down = y[:, None] * maps[:, None, :, 1] + maps[:, None, :, 2]  # (batch, height, 2)
    places = down[:, :, None] + across[:, None]
    return F.grid_sample(pixels.float(), places, padding_mode="reflection", align_corners=False)


def _between(uniform: Tensor, low: float, high: float) -> Tensor:
    return low + uniform * (high - low)


def _stretch(part: Tensor, place: Tensor, side: int) -> Tensor:
    """Which pixels of a side, (n, side), belong to a stretch that is this part of it, at this place."""
    length = (part * side).round().clamp(1, side)
    first = (place * (side - length + 1)).floor()
    index = torch.arange(side, device=part.device) - first[:, None]
    return (index >= 0) & (index < length[:, None])


# RandAugment's operations on colours, all (n, channels, height, width) from 0 to 255, amount (n, 1, 1, 1)


def _blend(images: Tensor, other: Tensor | float, amount: Tensor) -> Tensor:
    """From the other (at -1) to the images, and as far beyond them."""
    return (images + amount * (images - other)).clamp_(0, 255)


def _grey(images: Tensor) -> Tensor:
    """(n, 1, height, width), the luma of television (BT.601)."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images.unbind(1)
    return (0.299 * red + 0.587 * green + 0.114 * blue)[:, None]


def _contrast(images: Tensor, amount: Tensor) -> Tensor:
    return _blend(images, _grey(images).mean((1, 2, 3), keepdim=True), amount)


def _sharpness(images: Tensor, amount: Tensor) -> Tensor:
    """Away from, or towards, each pixel's mean with its neighbours, in which itself counts 5 of 13."""
    rows = images[..., :-2, :] + images[..., 1:-1, :] + images[..., 2:, :]
    around = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
    other = images.clone()
    other[..., 1:-1, 1:-1] = (around + 4 * images[..., 1:-1, 1:-1]) / 13
    return _blend(images, other, amount)


def _posterize(images: Tensor, amount: Tensor) -> Tensor:
    """Only the upper 8 to 4 bits are kept."""
    step = 2 ** (4 * amount.abs()).round()
    return (images / step).floor() * step


def _solarize(images: Tensor, amount: Tensor) -> Tensor:
    """What is brighter than a bound is inverted."""
    return torch.where(images >= 255 * (1 - amount.abs()), 255 - images, images)


def _autocontrast(images: Tensor, amount: Tensor) -> Tensor:
    """Each channel's darkest becomes 0, its brightest 255."""
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    span = high - low
    return torch.where(span > 0, (images - low) * 255 / span.clamp(min=1e-3), images)


def _equalize(images: Tensor, amount: Tensor) -> Tensor:
    """Each channel's values spread so that all are as frequent; integers, as Pillow does it."""
    values = images.long().flatten(2)
    counts = torch.zeros(*values.shape[:2], 256, dtype=torch.long, device=images.device)
    counts.scatter_add_(2, values, torch.ones_like(values))
    brightest = counts.gather(2, values.amax(2, keepdim=True))
    step = (counts.sum(2, keepdim=True) - brightest) // 255
    table = (counts.cumsum(2) - counts + step // 2) // step.clamp(min=1)
    spread = table.clamp_(0, 255).gather(2, values)
    return torch.where(step > 0, spread, values).view(images.shape).to(images.dtype)


# Name → how far it goes at the strongest: radians, slopes, and shifts of which 2 is the whole picture.
MOVES = {
    "rotate": math.radians(30),
    "shear_x": 0.3,
    "shear_y": 0.3,
    "shift_x": 2 * 150 / 331,
    "shift_y": 2 * 150 / 331,
}

COLOURS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "brightness": lambda images, amount: _blend(images, 0.0, 0.9 * amount),
    "colour": lambda images, amount: _blend(images, _grey(images), 0.9 * amount),
    "contrast": lambda images, amount: _contrast(images, 0.9 * amount),
    "sharpness": lambda images, amount: _sharpness(images, 0.9 * amount),
    "posterize": _posterize,
    "solarize": _solarize,
    "autocontrast": _autocontrast,
    "equalize": _equalize,
}

OPERATIONS = ("none", *MOVES, *COLOURS)
