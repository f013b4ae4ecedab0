"""From images to tokens: patches as a strided convolution, or a stem of overlapping ones before it."""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn


class Grid(NamedTuple):
    """How many rows and columns the tokens of an image form."""

    rows: int
    columns: int


class Tokens(NamedTuple):
    """Tokens and where they lie: what every tokeniser returns, and what vitrail.record reads grids from."""

    values: Tensor  # (batch, tokens, width), any special tokens first, then the grid row by row
    grid: Grid


class Patches(nn.Module):
    """Cuts images into patches and projects each to a token.

    stem: turns the images into features first, on a grid `stem_stride` times coarser; the convolution
    over patches then works on those. Images that patches do not fill are padded with zeros (after
    normalisation: the mean colour) at the right and the bottom.
    """

    def __init__(
        self,
        channels: int,
        width: int,
        patch: tuple[int, int],
        *,
        bias: bool = True,
        stem: nn.Module | None = None,
        stem_stride: int = 1,
    ) -> None:
        super().__init__()
        if patch[0] % stem_stride or patch[1] % stem_stride:
            raise ValueError(
                f"the stem makes the grid {stem_stride} times coarser, so patches must be a multiple "
                f"of that; got {patch[0]}x{patch[1]}"
            )
        self.patch = patch
        self.stem = nn.Identity() if stem is None else stem
        kernel = (patch[0] // stem_stride, patch[1] // stem_stride)
        self.projection = nn.Conv2d(channels, width, kernel, stride=kernel, bias=bias)

    def forward(self, images: Tensor) -> Tokens:
        """(batch, channels, height, width) → tokens (batch, rows · columns, width)."""
        height, width = images.shape[-2:]
        images = F.pad(images, (0, -width % self.patch[1], 0, -height % self.patch[0]))
        features = self.projection(self.stem(images))  # (batch, width, rows, columns)
        grid = Grid(*features.shape[-2:])
        return Tokens(features.flatten(2).transpose(1, 2), grid)


class ConvolutionalStem(nn.Sequential):
    """3x3 convolutions of stride 2, doubling channels: (batch, channels, h, w) → (batch, width, h/s, w/s).

    Gives a ViT the locality that little data does not teach it (Xiao et al. 2021).
    each: convolutions at every size, of which the first halves it.
    """

    def __init__(self, channels: int, width: int, stride: int, *, each: int = 1) -> None:
        steps = stride.bit_length() - 1
        if stride < 2 or stride != 1 << steps:
            raise ValueError(f"a convolutional stem halves the image; stride {stride} is no power of 2")
        if width % (stride // 2):
            raise ValueError(
                f"a convolutional stem of stride {stride} doubles its channels at every step; "
                f"width {width} is not a multiple of {stride // 2}"
            )
        layers: list[nn.Module] = []
        for step in range(steps):
            wide = width >> (steps - 1 - step)
            for number in range(each):
                layers += [
                    nn.Conv2d(channels, wide, 3, stride=1 if number else 2, padding=1, bias=False),
                    nn.BatchNorm2d(wide),
                    nn.ReLU(inplace=True),
                ]
                channels = wide
        super().__init__(*layers)
