"""Positions that are computed, not learned: sinusoids along a line, sines and cosines over a grid."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from vitrail.tokens import Grid


def _angles(positions: Tensor, count: int, longest: float) -> Tensor:
    """Each position times `count` falling frequencies, 1 to 1/longest (exclusive): (positions, count).

    Made on the CPU, for not every device has float64.
    """
    frequencies = longest ** -(torch.arange(count, dtype=torch.float64, device="cpu") / count)
    return positions.double()[:, None] * frequencies


def sinusoidal(length: int, width: int, *, longest: float = 10_000.0) -> Tensor:
    """Vaswani et al. 2017: (length, width), sine in the even columns and cosine in the odd ones."""
    if width % 2:
        raise ValueError(f"sinusoidal positions need an even width; got {width}")
    angles = _angles(torch.arange(length, device="cpu"), width // 2, longest)
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1).float()


def sincos_2d(grid: Grid, width: int, *, longest: float = 10_000.0) -> Tensor:
    """Positions on a grid: (rows · columns, width), quarters sin x, cos x, sin y, cos y."""
    if width % 4:
        raise ValueError(f"2-D sine-cosine positions need a width that 4 divides; got {width}")
    rows, columns = (_angles(torch.arange(n, device="cpu"), width // 4, longest) for n in grid)
    across = torch.cat([columns.sin(), columns.cos()], -1).expand(grid.rows, -1, -1)
    down = torch.cat([rows.sin(), rows.cos()], -1)[:, None].expand(-1, grid.columns, -1)
    return torch.cat([across, down], -1).flatten(0, 1).float()


def sincos_for(x: Tensor, grid: Grid) -> Tensor:
    """`sincos_2d` for tokens x (…, width), of their type and on their device; made once for each grid."""
    if torch.compiler.is_compiling() or type(x) is not Tensor:  # what is traced cannot be kept
        return sincos_2d(grid, x.shape[-1]).to(x)
    return _kept_sincos_2d(grid, x.shape[-1], x.device, x.dtype)


@lru_cache(maxsize=8)
def _kept_sincos_2d(grid: Grid, width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):  # training may come after
        return sincos_2d(grid, width).to(device, dtype)
