"""What a person asks of the Vision Transformer beyond parity: sizes, options, errors."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from PIL import Image

import vitrail
from vitrail.models import ViT, ViTConfig, describe
from vitrail.models.config import build_config

SMALL: dict[str, Any] = {
    "width": 48,
    "depth": 2,
    "heads": 3,
    "mlp_width": 96,
    "classes": 10,
    "image_size": 32,
}


def small(name: str = "vit-ti/8", **changes: Any) -> ViT:
    model = vitrail.create(name, **SMALL | changes).eval()
    assert isinstance(model, ViT)
    return model


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pool": "mean", "class_token": False},
        {"pool": "attention"},
        {"pool": "class+mean"},
        {"registers": 3},
        {"registers": 3, "positioned_tokens": 1},
        {"distillation_token": True},
        {"stem": "conv"},
        {"stem": "resnet", "resnet_units": (1, 1), "patch": 16},
        {"positions": "sincos"},
        {"positions": "none"},
        {"mlp": "swiglu", "layer_scale": 1e-5, "qk_norm": True, "qkv_bias": False},
        {"representation": 7},
        {"norm_after_pool": True, "pool": "mean"},
        {"patch": (4, 8)},
        {"channels": 1},
    ],
    ids=str,
)
def test_options_work_at_any_height_and_width(options: dict[str, Any]) -> None:
    model = small(**options)
    for height, width in ((32, 32), (48, 40), (33, 17)):
        images = torch.randn(2, model.config.channels, height, width)
        logits = model(images)
        assert logits.shape == (2, 10)
        logits.sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, f"{name} takes no part at {height}x{width}"
        model.zero_grad()


def test_without_classes_it_gives_features() -> None:
    model = small(classes=0)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 48)


def test_deit_answers_with_the_mean_of_two_heads() -> None:
    model = small(distillation_token=True)
    images = torch.randn(2, 3, 32, 32)
    by_class, by_distillation = model.both_logits(images)
    assert not torch.equal(by_class, by_distillation)
    assert torch.equal(model(images), (by_class + by_distillation) / 2)
    tokens = model.encode(images).values
    assert torch.equal(by_class, model.head(tokens[:, 0]))
    assert torch.equal(by_distillation, model.distillation_head(tokens[:, 1]))


def test_mean_pooling_leaves_special_tokens_out() -> None:
    model = small(pool="mean", registers=2)
    images = torch.randn(1, 3, 32, 32)
    assert torch.allclose(model.features(images), model.encode(images).values[:, 3:].mean(1))


def test_drop_path_skips_whole_samples_and_keeps_the_mean() -> None:
    from vitrail.models.block import DropPath

    drop = DropPath(0.25).train()
    x = drop(torch.ones(4000, 3, 2))
    rows = x.flatten(1)
    assert torch.equal(rows.amin(1), rows.amax(1))
    kept = rows[:, 0] > 0
    assert torch.allclose(rows[kept], torch.tensor(1 / 0.75))
    # the standard deviation of the kept share is sqrt(0.25 · 0.75 / 4000) = 0.0068; five of them
    assert abs(kept.float().mean() - 0.75) < 0.035
    assert torch.equal(drop.eval()(torch.ones(2, 2)), torch.ones(2, 2))


def test_rates_of_drop_path_rise_linearly() -> None:
    model = small(depth=5, drop_path=0.4)
    assert [block.drop_path.rate for block in model.blocks] == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])


def test_labels_say_how_many_classes() -> None:
    model = vitrail.create("vit-ti/16", labels=("cat", "dog"), depth=1)
    assert model.config.classes == 2
    assert model.labels == ("cat", "dog")


def test_preprocessing_fits_the_model() -> None:
    model = vitrail.create("vit-ti/16", depth=1, image_size=(64, 96))
    pixels = model.preprocess(Image.new("RGB", (300, 200), "white"))
    assert pixels.shape == (3, 64, 96)
    assert torch.equal(pixels, torch.ones(3, 64, 96))  # (1 - 0.5) / 0.5
    assert describe(model)["preprocess"]["mean"] == [0.5, 0.5, 0.5]


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("vit-b16", {}, ["vit-b16", "vit-b/16"]),
        ("resnet/50", {}, ["resnet/50"]),
        ("vit-ti/16", {"clases": 10}, ["clases", "classes"]),
        ("vit-ti/16", {"classes": "ten"}, ["classes='ten'", "int"]),
        ("vit-ti/16", {"pool": "max"}, ["pool='max'", "'mean'"]),
        ("vit-ti/16", {"mlp": "gellu"}, ["mlp='gellu'", "gelu"]),
        ("vit-ti/16", {"heads": 5}, ["192", "5 heads"]),
        ("vit-ti/16", {"image_size": (1, 2, 3)}, ["image_size"]),
        ("vit-ti/16", {"class_token": False}, ["class token", "mean"]),
        ("vit-ti/12", {"stem": "conv"}, ["12", "power of 2"]),
        ("vit-ti/0", {}, ["patch", "at least 1"]),
        ("vit-ti/16", {"depth": 0}, ["depth=0", "at least 1"]),
        ("vit-ti/16", {"drop_path": 1.0}, ["drop_path=1.0", "below 1"]),
        ("vit-ti/16", {"positioned_tokens": 2}, ["positioned_tokens=2", "0 to 1"]),
        ("deit-ti/16", {"pool": "mean"}, ["distillation_token", "pool='class'"]),
        ("vit-r50+b/24", {}, ["16", "24x24"]),
    ],
)
def test_errors_say_what_was_given_and_what_would_do(
    name: str, changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ValueError, match=re.escape(words[0])) as raised:
        vitrail.create(name, **changes)
    for word in words:
        assert word in str(raised.value)


def test_labels_that_contradict_the_classes_are_refused() -> None:
    with pytest.raises(ValueError, match="2 labels were given for 3 classes"):
        vitrail.create("vit-ti/16", labels=("a", "b"), classes=3, depth=1)


def test_images_of_the_wrong_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(3, 32, 32\).*\(batch, 3, height, width\)"):
        small()(torch.randn(3, 32, 32))


def test_config_survives_json() -> None:
    import json

    config = small(patch=(4, 8), registers=1).config
    assert build_config(ViTConfig, json.loads(json.dumps(dataclasses.asdict(config)))) == config


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("options", [{}, {"stem": "conv"}, {"positions": "sincos"}], ids=str)
def test_pictures_become_of_the_weights_type(kind: torch.dtype, options: dict[str, Any]) -> None:
    model = small(**options).to(kind)
    images = torch.stack([model.preprocess(Image.new("RGB", (40, 30), "white"))] * 2)
    assert images.dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(model(images), model(images.to(kind)))
        assert model(images).dtype == kind


def test_autocast_is_left_to_choose() -> None:
    model, images = small(), torch.randn(2, 3, 32, 32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert model(images).dtype == torch.bfloat16
        assert torch.equal(model(images.bfloat16().float()), model(images.bfloat16()))
