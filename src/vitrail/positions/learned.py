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
    # What torch.compile makes of interpolation has no gradient when sizes change from call to call.
    stretch = _stretch_whole if torch.compiler.is_dynamo_compiling() else _stretch
    image = stretch(image, new.rows, new.columns, rule)
    spatial = image.permute(0, 2, 3, 1).flatten(1, 2).to(table.dtype)
    return torch.cat([special, spatial], 1)


def _stretch(image: Tensor, rows: int, columns: int, rule: str) -> Tensor:
    """(1, width, old rows, old columns) → (1, width, rows, columns)."""
    return F.interpolate(image, size=(rows, columns), **RESIZE[rule])


# The same as one operation that the compiler does not look into.
_stretch_whole = torch.library.custom_op("vitrail::stretch", _stretch, mutates_args=())


@torch.library.custom_op("vitrail::stretch_backward", mutates_args=())
def _stretch_backward(gradient: Tensor, rows: int, columns: int, rule: str) -> Tensor:
    """The gradient to the old (rows, columns): stretching is a matrix for each axis, here transposed."""
    new_rows, new_columns = gradient.shape[-2:]
    down = _stretch(torch.eye(rows).to(gradient)[None, None], new_rows, rows, rule)[0, 0]
    across = _stretch(torch.eye(columns).to(gradient)[None, None], new_columns, columns, rule)[0, 0]
    return down.mT @ gradient @ across


def _keep_sizes(ctx: Any, inputs: tuple[Tensor, int, int, str], output: Tensor) -> None:
    ctx.old, ctx.rule = inputs[0].shape[-2:], inputs[3]


_stretch_whole.register_fake(
    lambda image, rows, columns, rule: image.new_empty(*image.shape[:2], rows, columns)
)
_stretch_backward.register_fake(
    lambda gradient, rows, columns, rule: gradient.new_empty(*gradient.shape[:2], rows, columns)
)
_stretch_whole.register_autograd(
    lambda ctx, gradient: (_stretch_backward(gradient, *ctx.old, ctx.rule), None, None, None),
    setup_context=_keep_sizes,
)


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
