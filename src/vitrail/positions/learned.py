"""Learned positions: a table for one grid, resized to any other."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.tokens import Grid

# How each library that weights come from stretches their positions to another grid.
RESIZE: dict[str, dict[str, Any]] = {
    "bicubic-antialias": {"mode": "bicubic", "antialias": True},  # timm, DINOv2 with registers
    "bicubic": {"mode": "bicubic"},  # transformers
    "bicubic-corners": {"mode": "bicubic", "align_corners": True},  # torchvision
    "bilinear-corners": {"mode": "bilinear", "align_corners": True},  # the original JAX code
}


def resize_positions(
    table: Tensor, old: Grid, new: Grid, *, prefix: int = 0, rule: str = "bicubic-antialias"
) -> Tensor:
    """Stretches a table (1, prefix + tokens of old, width) to (1, prefix + tokens of new, width).

    The first `prefix` rows belong to special tokens and stay. rule: a key of RESIZE.
    """
    if rule not in RESIZE:
        raise ValueError(f"no rule to resize positions is called {rule!r}; one of {', '.join(RESIZE)}")
    if new == old:
        return table
    special, spatial = table[:, :prefix], table[:, prefix:]
    precise = torch.promote_types(table.dtype, torch.float32)
    image = spatial.to(precise).unflatten(1, old).permute(0, 3, 1, 2)  # (1, width, rows, columns)
    image = F.interpolate(image, size=tuple(new), **RESIZE[rule])
    spatial = image.permute(0, 2, 3, 1).flatten(1, 2).to(table.dtype)
    return torch.cat([special, spatial], 1)


class LearnedPositions(nn.Module):
    """A learned row for each of `prefix` special tokens and each cell of a grid."""

    def __init__(self, grid: Grid, width: int, *, prefix: int = 0, resize: str = "bicubic-antialias") -> None:
        super().__init__()
        self.grid = grid
        self.prefix = prefix
        self.resize = resize
        self.table = nn.Parameter(torch.empty(1, prefix + math.prod(grid), width))
        nn.init.trunc_normal_(self.table, std=0.02)

    def forward(self, grid: Grid) -> Tensor:
        """The table for this grid, (1, prefix + rows · columns, width)."""
        return resize_positions(self.table, self.grid, grid, prefix=self.prefix, rule=self.resize)
