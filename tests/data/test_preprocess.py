"""The same picture gives the same pixels as timm and torchvision give, bit for bit."""

import json
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from judges import timm, torchvision
from vitrail.data.pictures import PictureError
from vitrail.data.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess, crop_fraction

IMAGENET: dict[str, Any] = {"mean": IMAGENET_MEAN, "std": IMAGENET_STD}
HALF: dict[str, Any] = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
VIT = Preprocess(resize=248, crop=(224, 224), interpolation="bicubic", **HALF)

SHAPES = [(1, 9), (9, 1), (40, 31), (30, 41), (200, 301), (331, 97), (223, 225), (480, 641)]


def noise(height, width):
    """A picture with detail at every scale, so that each pixel and each weight matters."""
    random = np.random.default_rng(height * 1000 + width)
    return Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))


def photos(shared):
    samples = sorted((shared / "data/imagenet_samples").iterdir())[::50]
    clothes = sorted((shared / "data/clothing/validation").glob("*/*"))[::40]
    assert len(samples) >= 8
    assert len(clothes) >= 8
    return samples + clothes


# Ours, and the arguments of timm.data.create_transform that mean the same.
SAME_AS_TIMM: dict[str, tuple[Preprocess, dict[str, Any]]] = {
    "shortest": (  # 224 / 0.9 = 248.9
        VIT,
        {"input_size": (3, 224, 224), "crop_pct": 0.9, "interpolation": "bicubic", **HALF},
    ),
    "bilinear, ImageNet's colours": (  # 192 / 0.875 = 219.4
        Preprocess(resize=219, crop=(192, 192), interpolation="bilinear", **IMAGENET),
        {"input_size": (3, 192, 192), "interpolation": "bilinear", **IMAGENET},
    ),
    "lanczos, padded": (  # 225 / 1.3 = 173.1: always smaller than the crop
        Preprocess(resize=173, crop=(225, 225), interpolation="lanczos", **HALF),
        {"input_size": (3, 225, 225), "crop_pct": 1.3, "interpolation": "lanczos", **HALF},
    ),
    "stretch": (
        Preprocess(resize=(224, 224), interpolation="bicubic", **IMAGENET),
        {"input_size": (3, 224, 224), "crop_pct": 1.0, "crop_mode": "squash"}
        | {"interpolation": "bicubic", **IMAGENET},
    ),
    "stretch, then crop": (  # 160 / 0.95 = 168.4, 256 / 0.95 = 269.5
        Preprocess(resize=(168, 269), crop=(160, 256), interpolation="nearest", **HALF),
        {"input_size": (3, 160, 256), "crop_pct": 0.95, "crop_mode": "squash"}
        | {"interpolation": "nearest", **HALF},
    ),
    "cover": (  # 160 / 0.9 = 177.8, 256 / 0.9 = 284.4
        Preprocess(resize=(177, 284), crop=(160, 256), interpolation="bicubic", fit="cover", **HALF),
        {"input_size": (3, 160, 256), "crop_pct": 0.9, "interpolation": "bicubic", **HALF},
    ),
    "contain": (
        Preprocess(
            resize=(180, 320),
            crop=(180, 320),
            interpolation="box",
            fit="contain",
            fill="mean",
            **IMAGENET,
        ),
        {"input_size": (3, 180, 320), "crop_pct": 1.0, "crop_mode": "border"}
        | {"interpolation": "box", **IMAGENET},
    ),
}


@pytest.mark.parametrize("name", SAME_AS_TIMM)
@pytest.mark.parametrize("shape", SHAPES)
def test_timm_gives_the_same_pixels(name, shape):
    if name == "contain" and min(shape) == 1:
        shape = (2, 3)  # timm cannot resize to a height of 0
    ours, theirs = SAME_AS_TIMM[name]
    expected = timm.data.create_transform(**theirs)(noise(*shape))
    assert torch.equal(ours(noise(*shape)), expected)
    assert expected.shape == (3, *ours.size)


@pytest.mark.parametrize("name", ["shortest", "stretch", "cover"])
def test_timm_gives_the_same_pixels_of_photos(name, shared):
    ours, theirs = SAME_AS_TIMM[name]
    transform = timm.data.create_transform(**theirs)
    for path in photos(shared):
        assert torch.equal(ours(path), transform(Image.open(path).convert("RGB"))), path


def test_torchvision_gives_the_same_pixels(shared):
    ours = Preprocess(resize=256, crop=(224, 224), interpolation="bilinear", **IMAGENET)
    theirs = torchvision.transforms._presets.ImageClassification(crop_size=224)
    for source in (*photos(shared)[::4], *(noise(*shape) for shape in SHAPES)):
        image = source if isinstance(source, Image.Image) else Image.open(source).convert("RGB")
        assert torch.equal(ours(source), theirs(image))


@pytest.mark.parametrize(
    "change",
    [
        {"mean": IMAGENET_MEAN},
        {"std": IMAGENET_STD},
        {"interpolation": "bilinear"},
        {"resize": 249},
        {"resize": (248, 248), "fit": "stretch"},
        {"crop_rounding": "down"},  # 248 · 303 / 200 = 375.7, (375 − 224) / 2 = 75.5
    ],
)
def test_the_comparison_notices(change):
    expected = timm.data.create_transform(**SAME_AS_TIMM["shortest"][1])(noise(200, 303))
    assert torch.equal(VIT(noise(200, 303)), expected)
    assert not torch.equal(replace(VIT, **change)(noise(200, 303)), expected)


def test_odd_differences_are_rounded_as_said():
    ramp = np.arange(8, dtype=np.uint8)[None].repeat(8, 0)
    unit: dict[str, Any] = {"interpolation": "nearest", "mean": (0.0,), "std": (1 / 255,)}

    def columns(crop, rounding):
        cut = Preprocess(resize=8, crop=(8, crop), crop_rounding=rounding, **unit)
        return cut(ramp)[0, 0].round().int().tolist()

    # 8 − 5 = 3, half of it 1.5
    assert columns(5, "even") == [2, 3, 4, 5, 6]
    assert columns(5, "down") == [1, 2, 3, 4, 5]
    # 8 − 11 = −3: three columns of padding
    assert columns(11, "even") == [0, *range(8), 0, 0]
    assert columns(11, "down") == [0, 0, *range(8), 0]


def test_one_channel_is_grey():
    theirs = timm.data.create_transform((1, 96, 96), crop_pct=0.9, mean=(0.4,), std=(0.3,))
    ours = Preprocess(  # 96 / 0.9 = 106.7
        resize=106, crop=(96, 96), interpolation="bilinear", mean=(0.4,), std=(0.3,)
    )
    colour = noise(120, 170)
    assert torch.equal(ours(colour), theirs(colour.convert("L")))
    grey = np.asarray(colour)[:, :, 0]
    assert torch.equal(ours(grey), theirs(Image.fromarray(grey)))
    assert ours.picture(ours(colour)).mode == "L"


def test_a_number_of_channels_that_no_picture_has():
    four = Preprocess(resize=(8, 8), interpolation="box", mean=(0.5,) * 4, std=(0.5,) * 4)
    with pytest.raises(ValueError, match="1 or 3 channels, this preprocessing has 4"):
        four(noise(8, 8))


def test_the_picture_comes_back():
    small = Preprocess(resize=(31, 40), interpolation="bicubic", **IMAGENET)
    image = noise(31, 40)
    assert small.picture(small(image)).tobytes() == image.tobytes()
    wild = torch.tensor([-100.0, 0.0, 100.0]).view(1, 1, 3).expand(3, 1, 3)
    # 0 is the mean: 255 · (0.485, 0.456, 0.406) = (123.7, 116.3, 103.5)
    shown = np.asarray(small.picture(wild))[0].tolist()
    assert shown == [[0, 0, 0], [124, 116, 104], [255, 255, 255]]
    with pytest.raises(ValueError, match=r"\(2, 3, 8, 8\); expected one picture \(3, height"):
        small.picture(torch.zeros(2, 3, 8, 8))


def test_float32_and_contiguous_whatever_torch_prefers():
    torch.set_default_dtype(torch.float64)
    try:
        pixels = VIT(noise(40, 50))
    finally:
        torch.set_default_dtype(torch.float32)
    assert pixels.dtype == torch.float32
    assert pixels.is_contiguous()
    assert torch.equal(pixels, VIT(noise(40, 50)))


@pytest.mark.parametrize("size", [(384, 384), (224, 320), (96, 96), (518, 518)])
@pytest.mark.parametrize("name", ["shortest", "bilinear, ImageNet's colours", "stretch", "cover"])
def test_resized_to_is_timms_with_another_input_size(name, size):
    ours, theirs = SAME_AS_TIMM[name]
    expected = timm.data.create_transform(**theirs | {"input_size": (3, *size)})(noise(200, 301))
    assert torch.equal(ours.resized_to(*size)(noise(200, 301)), expected)
    assert ours.resized_to(*size).size == size


def test_resized_to_without_a_common_fraction():
    odd = Preprocess(resize=256, crop=(224, 192), interpolation="bicubic", **HALF)
    assert odd.resized_to(448, 448).resize == 512  # 448 · 256 / 224
    assert odd.resized_to(448, 384).size == (448, 384)


@pytest.mark.parametrize(
    ("crop", "sides", "fraction"),
    [
        ((224, 224), (248, 248), 0.9),
        ((224, 224), (256, 256), 0.875),
        ((192, 192), (219, 219), 0.875),
        ((384, 384), (384, 384), 1.0),
        ((160, 256), (177, 284), 0.9),
        ((240, 240), (252, 252), 0.95),
        ((224, 192), (256, 256), None),
    ],
)
def test_crop_fraction(crop, sides, fraction):
    assert crop_fraction(crop, sides) == fraction


def test_config_json_holds_it():
    for ours, _ in SAME_AS_TIMM.values():
        stored = json.loads(json.dumps(ours.to_dict()))
        assert Preprocess.from_dict(stored) == ours
        assert stored.keys() == asdict(ours).keys()
    assert hash(VIT) == hash(Preprocess.from_dict(VIT.to_dict()))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"interpolatoin": "bicubic"}, "unknown field .* did you mean 'interpolation'"),
        ({"interpolation": "bicubik"}, "unknown interpolation 'bicubik'; did you mean 'bicubic'"),
        ({"interpolation": 3}, "unknown interpolation 3; expected one of: nearest"),
        ({"fit": ["cover"]}, "unknown fit"),
        ({"resize": 0}, "resize is 0; expected one number, or"),
        ({"resize": True}, "resize is True"),
        ({"resize": "248"}, "resize is '248'"),
        ({"resize": [224, 224, 3]}, r"resize is \(224, 224, 3\)"),
        ({"crop": 224}, r"crop is 224; expected \(height, width\), or None"),
        ({"crop": None}, "crop is None; .* different sizes"),
        ({"mean": 0.5}, "mean is 0.5; expected one number for each channel"),
        ({"mean": [0.5, 0.5, float("nan")]}, "mean is"),
        ({"mean": []}, "mean is"),
        ({"std": [0.5]}, "std is .* a positive number for each channel"),
        ({"std": [0.5, 0.5, 0]}, "std is"),
        ({"fit": "cover"}, "fit is 'cover'; expected 'shortest' for one number"),
        ({"resize": [9, 9], "fit": "cover"}, "expected 'shortest', for a square: resize=9"),
        ({"resize": [9, 8], "fit": "shortest"}, "fit is 'shortest'"),
    ],
)
def test_what_makes_no_sense_is_refused(change, reason):
    with pytest.raises(ValueError, match=reason):
        Preprocess.from_dict(VIT.to_dict() | change)


def test_what_is_missing_is_named():
    with pytest.raises(ValueError, match="lacks mean, std; given resize, crop, interpolation"):
        Preprocess.from_dict({"resize": 248, "crop": [224, 224], "interpolation": "bicubic"})


def test_a_thread_is_not_resized_to_gigabytes():
    with pytest.raises(PictureError, match="1 x 20000 pixels would be resized to 248 x 4960000"):
        VIT(np.zeros((1, 20_000), np.uint8))
