"""Learned positions, resized as each library resizes its own."""

import math

import pytest
import scipy.ndimage
import torch
from torch import Tensor

from compare import distance, disturbed, same
from judges import timm, torchvision, transformers
from vitrail.positions import RESIZE, LearnedPositions, resize_positions
from vitrail.tokens import Grid

SQUARE, OBLONG = Grid(7, 7), Grid(4, 6)
NEW = [Grid(3, 3), Grid(7, 8), Grid(14, 14), Grid(1, 9)]


def table_for(grid: Grid, prefix: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(1, prefix + math.prod(grid), 12, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("prefix", [0, 1, 5])
@pytest.mark.parametrize("old", [SQUARE, OBLONG], ids=str)
@pytest.mark.parametrize("new", NEW, ids=str)
def test_timm(new: Grid, old: Grid, prefix: int, dtype: torch.dtype) -> None:
    table = table_for(old, prefix, dtype)
    expected = timm.layers.resample_abs_pos_embed(table, list(new), list(old), num_prefix_tokens=prefix)
    assert same(resize_positions(table, old, new, prefix=prefix), expected)


@pytest.mark.parametrize("family", ["vit", "dinov2", "dinov2_with_registers"])
@pytest.mark.parametrize("new", NEW, ids=str)
def test_transformers(new: Grid, family: str) -> None:
    name = {"vit": "ViT", "dinov2": "Dinov2", "dinov2_with_registers": "Dinov2WithRegisters"}[family]
    module = getattr(transformers.models, family)
    config = getattr(module, f"configuration_{family}")
    modeling = getattr(module, f"modeling_{family}")
    judge = getattr(modeling, f"{name}Embeddings")(
        getattr(config, f"{name}Config")(image_size=28, patch_size=4, hidden_size=12)
    )
    with torch.no_grad():
        judge.position_embeddings.normal_()
    tokens = torch.zeros(1, 1 + math.prod(new), 12)
    expected = judge.interpolate_pos_encoding(tokens, 4 * new.rows, 4 * new.columns)
    rule = "bicubic-antialias" if family == "dinov2_with_registers" else "bicubic"
    found = resize_positions(judge.position_embeddings, SQUARE, new, prefix=1, rule=rule)
    assert same(found, expected)
    others = {
        resize_positions(judge.position_embeddings, SQUARE, new, prefix=1, rule=other).sum().item()
        for other in RESIZE
    }
    assert len(others) > 1  # the rules are not all alike, so naming the right one matters


@pytest.mark.parametrize("new", [3, 8, 14])
def test_torchvision(new: int) -> None:
    table = table_for(SQUARE, 1)
    state = torchvision.models.vision_transformer.interpolate_embeddings(
        new * 4, 4, {"encoder.pos_embedding": table}
    )
    found = resize_positions(table, SQUARE, Grid(new, new), prefix=1, rule="bicubic-corners")
    assert same(found, state["encoder.pos_embedding"])


@pytest.mark.parametrize("new", NEW, ids=str)
def test_jax(new: Grid) -> None:
    """The original code zooms the grid with scipy, order=1: straight lines between corner cells."""
    table = table_for(SQUARE, 1, torch.float64)
    spatial = table[0, 1:].unflatten(0, SQUARE).numpy()
    factors = (new.rows / SQUARE.rows, new.columns / SQUARE.columns, 1)
    zoomed = torch.from_numpy(scipy.ndimage.zoom(spatial, factors, order=1))
    expected = torch.cat([table[:, :1], zoomed.flatten(0, 1)[None]], 1)
    found = resize_positions(table, SQUARE, new, prefix=1, rule="bilinear-corners")
    assert distance(found, expected) < 1e-12


@pytest.mark.parametrize("rule", RESIZE)
def test_the_grid_itself_is_left_alone(rule: str) -> None:
    table = table_for(OBLONG, 2)
    assert resize_positions(table, OBLONG, OBLONG, prefix=2, rule=rule) is table


@pytest.mark.parametrize("rule", RESIZE)
def test_a_turned_grid_of_as_many_tokens_is_resized(rule: str) -> None:
    """4 x 6 and 6 x 4 have the same number of tokens, which must not be mistaken for the same grid."""
    table = table_for(OBLONG, 1)
    found = resize_positions(table, OBLONG, Grid(6, 4), prefix=1, rule=rule)
    assert found.shape == table.shape
    assert same(found[:, :1], table[:, :1])
    assert distance(found, table) > 0.1


@pytest.mark.parametrize("rule", RESIZE)
def test_what_is_constant_stays_constant(rule: str) -> None:
    table = torch.full((1, math.prod(SQUARE), 3), 1.5)
    torch.testing.assert_close(
        resize_positions(table, SQUARE, Grid(5, 11), rule=rule), torch.full((1, 55, 3), 1.5)
    )


def test_float64_stays_precise() -> None:
    """As the float32 answer, but not rounded through it."""
    table = table_for(SQUARE, 1, torch.float64)
    found = resize_positions(table, SQUARE, Grid(5, 9), prefix=1)
    coarse = resize_positions(table.float(), SQUARE, Grid(5, 9), prefix=1)
    assert found.dtype == torch.float64
    assert 0 < distance(coarse, found) < 1e-6


def test_the_module_resizes_its_table_and_learns_through_it() -> None:
    positions = LearnedPositions(SQUARE, 12, prefix=2, resize="bicubic")
    assert positions.table.shape == (1, 2 + 49, 12)
    assert positions.table.std().item() == pytest.approx(0.02, rel=0.2)
    assert positions(SQUARE) is positions.table
    found = positions(Grid(3, 5))
    assert same(found, resize_positions(positions.table, SQUARE, Grid(3, 5), prefix=2, rule="bicubic"))
    with disturbed(positions.table):
        assert distance(positions(Grid(3, 5)), found) > 1e-3
    positions(Grid(14, 14)).sum().backward()
    assert positions.table.grad is not None
    assert (positions.table.grad != 0).all()


def test_an_unknown_rule_is_an_error_that_names_them_all() -> None:
    with pytest.raises(ValueError, match="'nearest'; one of " + ", ".join(RESIZE)):
        resize_positions(table_for(SQUARE, 0), SQUARE, OBLONG, rule="nearest")
