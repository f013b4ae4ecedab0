"""Computed positions against the papers' formulas and the judges' tables."""

import math

import pytest
import torch

from compare import distance
from judges import timm, transformers
from vitrail.positions import sincos_2d, sincos_for, sinusoidal
from vitrail.tokens import Grid


@pytest.mark.parametrize(("length", "width"), [(1, 2), (50, 512), (7, 6)])
def test_sinusoidal_is_the_papers_formula(length: int, width: int) -> None:
    """PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i + 1) = cos(pos / 10000^(2i/d))."""
    expected = [
        [
            (math.cos if column % 2 else math.sin)(position / 10000 ** (column // 2 * 2 / width))
            for column in range(width)
        ]
        for position in range(length)
    ]
    table = sinusoidal(length, width)
    assert table.dtype == torch.float32
    torch.testing.assert_close(table, torch.tensor(expected), rtol=0, atol=1e-7)


def test_sinusoidal_is_the_marian_table() -> None:
    """transformers' Marian has the same columns, all sines before all cosines."""
    judge = transformers.models.marian.modeling_marian.MarianSinusoidalPositionalEmbedding(100, 32)
    expected = judge.create_weight()
    found = sinusoidal(100, 32)
    assert distance(torch.cat([found[:, 0::2], found[:, 1::2]], 1), expected) < 1e-6
    assert distance(found, expected) > 0.1


def test_a_shift_is_a_rotation() -> None:
    """The paper's reason for sinusoids: PE(pos + k) is one linear function of PE(pos) for every pos."""
    table, width, k = sinusoidal(60, 16).double(), 16, 7
    for i in range(width // 2):
        angle = torch.tensor(k / 10000 ** (2 * i / width), dtype=torch.float64)
        turn = torch.stack([
            torch.stack([angle.cos(), angle.sin()]), torch.stack([-angle.sin(), angle.cos()])
        ])  # fmt: skip
        pair = table[:, 2 * i : 2 * i + 2]
        torch.testing.assert_close(pair[k:], pair[:-k] @ turn.T, rtol=0, atol=1e-6)


@pytest.mark.parametrize("grid", [Grid(1, 1), Grid(3, 5), Grid(6, 2)], ids=str)
def test_sincos_2d_is_transformers(grid: Grid) -> None:
    """transformers' ViTMAE has rows before columns; MAE's own code, and we, columns before rows."""
    module = transformers.models.vit_mae.modeling_vit_mae
    expected = module.build_2d_sinusoidal_position_embedding(*grid, 32)
    x, y = sincos_2d(grid, 32).chunk(2, -1)
    assert distance(torch.cat([y, x], -1), expected) < 1e-6
    assert distance(torch.cat([x, y], -1), expected) > 0.1 or grid == (1, 1)


@pytest.mark.parametrize("grid", [Grid(3, 5), Grid(6, 2)], ids=str)
def test_sincos_2d_is_timms(grid: Grid) -> None:
    """timm's quarters are sin y, sin x, cos y, cos x; ours are sin x, cos x, sin y, cos y."""
    expected = timm.layers.build_sincos2d_pos_embed(list(grid), 32)
    sin_x, cos_x, sin_y, cos_y = sincos_2d(grid, 32).chunk(4, -1)
    assert distance(torch.cat([sin_y, sin_x, cos_y, cos_x], -1), expected) < 1e-6
    assert distance(torch.cat([sin_x, sin_y, cos_x, cos_y], -1), expected) > 0.1


def test_a_table_is_made_once_for_each_grid() -> None:
    x = torch.zeros(2, 21, 32)
    with torch.inference_mode():
        table = sincos_for(x, Grid(3, 7))
    assert torch.equal(table, sincos_2d(Grid(3, 7), 32))
    assert sincos_for(x + 1, Grid(3, 7)) is table
    assert torch.equal(sincos_for(x, Grid(7, 3)), sincos_2d(Grid(7, 3), 32))
    assert torch.equal(sincos_for(x.half(), Grid(3, 7)), table.half())
    weight = torch.ones(32, requires_grad=True)
    (table * weight).sum().backward()  # learning goes on after looking
    assert weight.grad is not None


@pytest.mark.parametrize("longest", [100.0, 10_000.0])
def test_the_longest_wave_can_be_chosen(longest: float) -> None:
    table = sincos_2d(Grid(2, 3), 8, longest=longest)
    x, y, slow = 2, 1, longest**-0.5  # the last token; the second of two frequencies
    assert table[-1].tolist() == pytest.approx(
        [
            math.sin(x), math.sin(x * slow), math.cos(x), math.cos(x * slow),
            math.sin(y), math.sin(y * slow), math.cos(y), math.cos(y * slow),
        ], abs=1e-6
    )  # fmt: skip


def test_widths_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="even width; got 7"):
        sinusoidal(3, 7)
    with pytest.raises(ValueError, match="4 divides; got 6"):
        sincos_2d(Grid(2, 2), 6)
