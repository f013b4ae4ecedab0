"""What a person gets to see."""

import gc
import weakref

import pytest
import torch

import vitrail
from compare import same
from looking import HEADS, LAYERS, pictures, small
from vitrail.attention import MultiHeadAttention
from vitrail.look.seen import Seen
from vitrail.tokens import Grid


@pytest.mark.parametrize(
    ("changes", "special"),
    [
        ({}, 1),
        ({"class_token": False, "pool": "mean"}, 0),
        ({"registers": 4}, 5),
        ({"distillation_token": True}, 2),
        ({"distillation_token": True, "registers": 3}, 5),
    ],
    ids=str,
)
def test_grid_and_map(changes: dict, special: int) -> None:
    """Not the size of creation, not square, not a multiple of the patch: 9 x 27 pixels are 3 x 7."""
    model = small(**changes)
    with vitrail.record(model, -1) as seen:
        model(pictures(size=(9, 27)))
    call = seen[LAYERS[-1]]
    assert call.grid == (3, 7)
    assert call.special == special
    assert call.weights.shape[-2:] == (special + 21, special + 21)
    for query in (0, special + 4):
        drawn = call.map(query)
        assert drawn.shape == (2, HEADS, 3, 7)
        for row in range(3):
            for column in range(7):
                key = special + 7 * row + column
                assert torch.equal(drawn[:, :, row, column], call.weights[:, :, query, key])
    average = sum(call.map(query) for query in range(21)) / 21
    expected = call.map(0) if special else average
    torch.testing.assert_close(call.map(), expected)


def test_only_the_last_call_is_kept_unless_asked() -> None:
    model, name = small(), LAYERS[0]
    with vitrail.record(model, 0) as last:
        model(pictures())
        first = weakref.ref(last[name].weights)
        model(pictures(batch=3))
    gc.collect()
    assert first() is None
    assert [len(call.weights) for call in last.calls(name)] == [3]
    with vitrail.record(model, 0, every_call=True) as every:
        model(pictures())
        model(pictures(batch=3))
    assert [len(call.weights) for call in every.calls(name)] == [2, 3]
    assert every[name] is every.calls(name)[-1]


def test_asking_for_what_was_not_recorded() -> None:
    model = small()
    with vitrail.record(model, 0) as seen:
        with pytest.raises(KeyError, match="is watched but has not run"):
            seen[LAYERS[0]]
        model(pictures())
    with pytest.raises(KeyError, match=r"'blocks.1.attention' is not watched; did you mean"):
        seen["blocks.1.attention"]


def test_tokens_without_a_grid_have_no_map() -> None:
    layer = MultiHeadAttention(8, 2)
    with vitrail.record(layer) as seen:
        layer(torch.randn(1, 3, 8))
    (call,) = seen.values()
    assert call.grid is None
    with pytest.raises(ValueError, match=r"do not lie on a grid; use .weights"):
        call.map()


def test_what_was_seen_says_so() -> None:
    model = vitrail.create("vit-ti/16", depth=2, image_size=(32, 48)).eval()
    with vitrail.record(model) as seen:
        assert "nothing" in repr(seen)
        model(torch.randn(1, 3, 32, 48))
    assert repr(seen).count("\n") == 1
    assert "blocks.1.attention" in repr(seen[-1])
    assert "(1, 3, 7, 7)" in repr(seen[-1])
    with pytest.raises(ValueError, match="out of range"):
        seen[-1].map(7)


def test_frames_before_heads() -> None:
    """(batch, frames, heads, queries, keys): queries are always the last axis but one."""
    weights = torch.rand(2, 3, HEADS, 5, 5)
    call = Seen("x", weights, Grid(2, 2))
    assert same(call.map(), weights[..., 0, 1:].unflatten(-1, (2, 2)))
    assert same(call.map(4), weights[..., 4, 1:].unflatten(-1, (2, 2)))
    with pytest.raises(ValueError, match="query 5 is out of range: 'x' has 5"):
        call.map(5)
