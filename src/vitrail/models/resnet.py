"""The convolutional stages of the hybrids: a ResNet with standardised weights and group norm.

Kolesnikov et al. 2020 (BiT) as used by Dosovitskiy et al. 2021, section 3.1 "Hybrid Architecture".
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

WIDTHS = (256, 512, 1024, 2048)
STEM_WIDTH = 64
GROUPS = 32


def pad_same(x: Tensor, kernel: int, stride: int, value: float = 0.0) -> Tensor:
    """Pads (…, height, width) so that the result has ⌈size / stride⌉ cells, the odd one at the end."""
    down, across = (max(kernel - 1 - (size - 1) % stride, 0) for size in x.shape[-2:])
    edges = (across // 2, across - across // 2, down // 2, down - down // 2)
    return F.pad(x, edges, value=value)


class StandardConv(nn.Conv2d):
    """A convolution whose filters are standardised to mean 0 and variance 1 before use."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        filters = self.weight.flatten(1)
        filters = F.layer_norm(filters, filters.shape[1:], eps=1e-8).view_as(self.weight)
        x = pad_same(x, self.kernel_size[0], self.stride[0])
        return F.conv2d(x, filters, None, self.stride)


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions around a shortcut; (batch, inputs, h, w) → (batch, width, h/s, w/s)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        inner = width // 4
        self.conv1, self.norm1 = StandardConv(inputs, inner, 1), nn.GroupNorm(GROUPS, inner)
        self.conv2, self.norm2 = StandardConv(inner, inner, 3, stride), nn.GroupNorm(GROUPS, inner)
        self.conv3, self.norm3 = StandardConv(inner, width, 1), nn.GroupNorm(GROUPS, width)
        self.shortcut = nn.Sequential()
        if inputs != width or stride > 1:
            self.shortcut.append(StandardConv(inputs, width, 1, stride))
            self.shortcut.append(nn.GroupNorm(GROUPS, width))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


class ResNetStages(nn.Module):
    """Root convolution, pooling, and as many stages as `units` names: (batch, channels, h, w) → features.

    The features have WIDTHS[len(units) - 1] channels on a grid `stride` times coarser.
    """

    def __init__(self, channels: int, units: Sequence[int]) -> None:
        super().__init__()
        self.root = nn.Sequential(StandardConv(channels, STEM_WIDTH, 7, 2), nn.GroupNorm(GROUPS, STEM_WIDTH))
        self.stages = nn.ModuleList()
        inputs = STEM_WIDTH
        for stage, (count, width) in enumerate(zip(units, WIDTHS, strict=False)):
            blocks = nn.Sequential()
            for unit in range(count):
                blocks.append(Bottleneck(inputs, width, 2 if stage and unit == 0 else 1))
                inputs = width
            self.stages.append(blocks)
        self.width = inputs
        self.stride = 4 * 2 ** max(len(units) - 1, 0)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.root(images))
        x = F.max_pool2d(pad_same(x, 3, 2, value=-math.inf), 3, 2)
        for stage in self.stages:
            x = stage(x)
        return x
