"""The published figures: parameters, multiply-adds, tokens, memory of attention."""

from __future__ import annotations

import math

import pytest
import torch

from vitrail.models import attention_memory, config_of, costs, create, names

# Parameters with heads of 1000 classes: as published with the papers' checkpoints.
PARAMETERS = {
    "vit-ti/16": 5_717_416,
    "vit-s/16": 22_050_664,
    "vit-b/16": 86_567_656,
    "vit-b/32": 88_224_232,
    "vit-l/16": 304_326_632,
    "vit-l/32": 306_535_400,
    "vit-h/14": 632_045_800,
    "deit-ti/16": 5_910_800,
    "deit-s/16": 22_436_432,
    "deit-b/16": 87_338_192,
    "vit-r26+s/32": 36_431_912,
    "vit-r50+b/16": 98_659_112,
}


@pytest.mark.parametrize(("name", "parameters"), PARAMETERS.items())
def test_parameters_are_the_published_ones(name: str, parameters: int) -> None:
    assert costs(config_of(name)).parameters == parameters


def test_the_count_is_that_of_a_real_model_and_not_of_another() -> None:
    model = create("vit-ti/16")
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS["vit-ti/16"]
    assert costs(config_of("vit-ti/16", qkv_bias=False)).parameters == PARAMETERS["vit-ti/16"] - 12 * 3 * 192


def test_multiply_adds_of_b16() -> None:
    assert costs(config_of("vit-b/16")).macs == pytest.approx(17.58e9, rel=0.01)


def test_multiply_adds_from_the_formula() -> None:
    """Patches, then per block 4 projections, 2 products with tokens², 2 layers of the MLP, then the head."""
    tokens, width, mlp, depth = 197, 192, 768, 12
    block = 4 * tokens * width**2 + 2 * tokens**2 * width + 2 * tokens * width * mlp
    expected = 196 * (16 * 16 * 3) * width + depth * block + width * 1000
    assert costs(config_of("vit-ti/16")).macs == expected


def test_memory_of_all_attention_matrices() -> None:
    """tokens² · layers · heads · 4 bytes: the decks' 112 MB, 192 MB and 768 GB."""
    assert attention_memory(14 * 14, layers=48, heads=16) == 196 * 196 * 48 * 16 * 4
    assert round(attention_memory(14 * 14, layers=48, heads=16) / 2**20, 1) == 112.5
    assert attention_memory(16 * 16, layers=48, heads=16) == 192 * 2**20
    assert attention_memory(128 * 128, layers=48, heads=16) == 768 * 2**30
    assert costs(config_of("vit-b/16")).attention_bytes == 197 * 197 * 12 * 12 * 4


@pytest.mark.parametrize("name", ["vit-ti/16", "vit-r26+s/32", "deit-ti/16", "dinov2-reg-s/14"])
def test_tokens_are_what_encode_gives(name: str) -> None:
    config = config_of(name, image_size=(224, 320), depth=1)
    with torch.device("meta"):
        from vitrail.models import build

        model = build("vit", config)
        values, grid = model.encode(torch.empty(1, 3, 224, 320))
    assert values.shape[1] == costs(config).tokens == config.special_tokens + math.prod(grid)


def test_every_name_can_be_costed() -> None:
    assert len(names()) == len(set(names()))
    for name in names():
        assert costs(config_of(name, depth=1)).parameters > 0
