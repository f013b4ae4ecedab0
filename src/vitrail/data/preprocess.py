"""From a picture to what a model is fed: resize, centre crop, normalise; and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from PIL import Image

from vitrail.data.pictures import PictureError, Source, open_picture
from vitrail.words import unknown

if TYPE_CHECKING:
    from torch import Tensor

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

INTERPOLATIONS = {method.name.lower(): method for method in Image.Resampling}

Sides = tuple[int, int]  # height, width

# What each fit makes of a picture (height, width) that is to be resized to (tall, wide). The sums
# are those of torchvision ("shortest") and timm ("cover", "contain"), down to the rounding.
FITS: dict[str, Callable[[int, int, int, int], Sides]] = {
    "shortest": lambda height, width, tall, wide: (
        int(tall * height / min(height, width)),
        int(wide * width / min(height, width)),
    ),
    "stretch": lambda height, width, tall, wide: (tall, wide),
    "cover": lambda height, width, tall, wide: _divided(height, width, min(height / tall, width / wide)),
    "contain": lambda height, width, tall, wide: _divided(height, width, max(height / tall, width / wide)),
}

# Where a centre crop of `want` begins among `have` pixels; before the first if there are too few.
# They differ by one pixel when half of the difference is not whole: torchvision and timm round a
# cut to the even number and pad less before than after, transformers (with PIL) rounds down.
OFFSETS: dict[str, Callable[[int, int], int]] = {
    "even": lambda have, want: round((have - want) / 2) if have >= want else -((want - have) // 2),
    "down": lambda have, want: (have - want) // 2,
}

FILLS: dict[str, Callable[[tuple[float, ...]], int | tuple[int, ...]]] = {
    "black": lambda mean: 0,
    "mean": lambda mean: tuple(round(255 * value) for value in mean),
}

CHOICES: dict[str, Collection[str]] = {
    "interpolation": INTERPOLATIONS,
    "fit": FITS,
    "crop_rounding": OFFSETS,
    "fill": FILLS,
}

MODES = {1: "L", 3: "RGB"}

# A picture of one row can be resized to gigabytes; Pillow refuses to open files as large as this.
MOST_PIXELS = 2 * 1024**3 // 12


@dataclass(frozen=True, kw_only=True)
class Preprocess:
    """How pictures become a model's input, (channels, height, width) float32.

    resize: the shortest side in pixels, the ratio kept; or exactly this (height, width).
    crop: (height, width) of the centre crop; a smaller picture is padded. None: nothing is cropped.
    interpolation: nearest, box, bilinear, hamming, bicubic or lanczos, as Pillow does them.
    mean, std: subtracted from, and then dividing, values from 0 to 1, channel by channel. One
        channel makes the picture greyscale.
    fit: how to resize. A number: "shortest". A pair: "stretch" unless told to "cover" it or to be
        "contain"ed in it, which keep the ratio.
    crop_rounding: half a pixel goes "even" (timm, torchvision) or "down" (transformers).
    fill: the colour of the padding, "black" or "mean".
    """

    resize: int | Sides
    crop: Sides | None = None
    interpolation: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    fit: str = ""
    crop_rounding: str = "even"
    fill: str = "black"

    def __post_init__(self) -> None:
        """Complete what was left out, and refuse what makes no sense."""
        settle = super().__setattr__  # the way into a frozen object
        for name in ("resize", "crop", "mean", "std"):
            if isinstance(getattr(self, name), list):  # JSON knows no tuples
                settle(name, tuple(getattr(self, name)))
        one_side = _is_side(self.resize)
        if not self.fit:
            settle("fit", "shortest" if one_side else "stretch")
        if self.fit == "stretch" and self.crop == self.resize:
            settle("crop", None)

        for name, choices in CHOICES.items():
            if getattr(self, name) not in tuple(choices):
                raise ValueError(unknown(name, getattr(self, name), choices))
        self._expect("resize", one_side or _is_size(self.resize), "one number, or (height, width)")
        self._expect("crop", self.crop is None or _is_size(self.crop), "(height, width), or None")
        self._expect("mean", _is_colour(self.mean), "one number for each channel")
        self._expect(
            "std",
            _is_colour(self.std) and len(self.std) == len(self.mean) and min(self.std) > 0,
            f"a positive number for each channel, like mean {self.mean}",
        )
        self._expect(
            "fit",
            (self.fit == "shortest") == one_side,
            f"'shortest' for one number, another for (height, width); resize is {self.resize}",
        )
        self._expect(
            "crop",
            self.crop is not None or self.fit == "stretch",
            f"(height, width): with fit {self.fit!r} pictures come in different sizes",
        )
        self._expect(
            "fit",
            self.fit != "cover" or self.sides[0] != self.sides[1],
            f"'shortest', for a square: resize={self.sides[0]}",
        )

    def _expect(self, name: str, right: bool, expected: str) -> None:
        if not right:
            raise ValueError(f"{name} is {getattr(self, name)!r}; expected {expected}")

    @property
    def size(self) -> Sides:
        """(height, width) of what it gives."""
        return cast("Sides", self.crop or self.resize)

    @property
    def sides(self) -> Sides:
        """(height, width) that pictures are resized by, before the crop."""
        return self.resize if isinstance(self.resize, tuple) else (self.resize, self.resize)

    @property
    def mode(self) -> str:
        """What Pillow calls pictures of so many channels."""
        if len(self.mean) not in MODES:
            raise ValueError(
                f"pictures have 1 or 3 channels, this preprocessing has {len(self.mean)}; feed the "
                "model tensors of your own"
            )
        return MODES[len(self.mean)]

    def __call__(self, source: Source) -> Tensor:
        """The picture (anything that `open_picture` takes) as (channels, height, width) float32."""
        return self.normalise(self.pixels(source))

    def pixels(self, source: Source) -> Tensor:
        """The same before the normalisation, uint8."""
        import torch

        image = open_picture(source).convert(self.mode)
        height, width = FITS[self.fit](image.height, image.width, *self.sides)
        if height * width > MOST_PIXELS:
            raise PictureError(
                f"a picture of {image.height} x {image.width} pixels would be resized to "
                f"{height} x {width}, more than {MOST_PIXELS:,} pixels; crop it first"
            )
        image = image.resize((width, height), INTERPOLATIONS[self.interpolation])
        if self.crop:
            offset = OFFSETS[self.crop_rounding]
            top, left = offset(height, self.crop[0]), offset(width, self.crop[1])
            whole, height, width = image, *self.crop
            image = Image.new(whole.mode, (width, height), FILLS[self.fill](self.mean))
            image.paste(whole, (-left, -top))

        return torch.from_numpy(np.array(image)).view(height, width, -1).permute(2, 0, 1).contiguous()

    def keeps(self, height: int, width: int) -> bool:
        """Whether pictures of this size are neither resized nor cropped."""
        return FITS[self.fit](height, width, *self.sides) == (height, width) == self.size

    def normalise(self, pixels: Tensor) -> Tensor:
        """Pixels from 0 to 255, (…, channels, height, width), as a model is fed them.

        Changes pixels that come as float32, rather than take as much memory again.
        """
        mean, std = (values.to(pixels.device) for values in self._mean_and_std())
        return pixels.float().div_(255).sub_(mean).div_(std)

    def picture(self, pixels: Tensor) -> Image.Image:
        """The picture that an input (channels, height, width) shows: the normalisation undone."""
        if pixels.ndim != 3 or len(pixels) != len(self.mean):
            raise ValueError(
                f"given a tensor {tuple(pixels.shape)}; expected one picture "
                f"({len(self.mean)}, height, width)"
            )
        mean, std = self._mean_and_std()
        values = pixels.detach().cpu().float().mul(std).add_(mean).mul_(255).round_().clamp_(0, 255)
        array = values.byte().permute(1, 2, 0).numpy()
        return Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else np.ascontiguousarray(array))

    def _mean_and_std(self) -> tuple[Tensor, Tensor]:
        """Each (channels, 1, 1)."""
        import torch

        mean, std = torch.tensor([self.mean, self.std], dtype=torch.float32, device="cpu")[:, :, None, None]
        return mean, std

    def resized_to(self, height: int, width: int) -> Preprocess:
        """The same for a model of another size, which sees the same part of a picture."""
        crop = self.size
        fraction = crop_fraction(crop, self.sides) or max(crop) / max(self.sides)
        resize, fit = sides_before_crop((height, width), fraction, self.fit)
        return replace(self, resize=resize, fit=fit, crop=(height, width))

    def to_dict(self) -> dict[str, Any]:
        """The fields, as config.json holds them."""
        return {
            name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Preprocess:
        """What `to_dict` gave. A field that is unknown or missing is refused."""
        names = {field.name: field.default is MISSING for field in fields(cls)}
        for name in values:
            if name not in names:
                raise ValueError(unknown("field of preprocessing", name, names))
        missing = [name for name, needed in names.items() if needed and name not in values]
        if missing:
            raise ValueError(
                f"preprocessing lacks {', '.join(missing)}; given {', '.join(values) or 'nothing'}"
            )
        return cls(**values)


def sides_before_crop(crop: Sides, fraction: float, fit: str) -> tuple[int | Sides, str]:
    """`resize` and `fit` for which the crop is this fraction of the resized picture's sides."""
    height, width = (math.floor(side / fraction) for side in crop)
    if fit in ("shortest", "cover"):
        return (height, "shortest") if height == width else ((height, width), "cover")
    return (height, width), fit


def crop_fraction(crop: Sides, sides: Sides) -> float | None:
    """The p with floor(crop / p) = sides, in height and in width: 7/8, else the roundest, if any."""
    pairs = list(zip(crop, sides, strict=True))
    roundest = (min(c * 10**n // s for c, s in pairs) / 10**n for n in range(17))
    for fraction in (7 / 8, *roundest):  # most libraries and recipes crop 7/8
        if fraction and all(math.floor(c / fraction) == s for c, s in pairs):
            return fraction
    return None


def _divided(height: int, width: int, ratio: float) -> Sides:
    return max(1, round(height / ratio)), max(1, round(width / ratio))


def _is_side(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_size(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(map(_is_side, value))


def _is_colour(value: object) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) > 0
        and all(isinstance(v, (int, float)) and math.isfinite(v) for v in value)
    )
