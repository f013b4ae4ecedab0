"""Preprocessing read from other libraries' files gives their pixels, and goes back out unchanged."""

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from judges import timm, torchvision, transformers
from vitrail.data.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess
from vitrail.weights.preprocessing import (
    TORCHVISION,
    from_timm,
    from_torchvision,
    from_transformers,
    to_timm,
    to_transformers,
)
from vitrail.weights.transformers import FAMILIES

HALF: dict[str, Any] = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
SHAPES = [(1, 9), (9, 1), (40, 31), (200, 301), (331, 97), (223, 225)]
VIT = Preprocess(resize=248, crop=(224, 224), interpolation="bicubic", **HALF)


def noise(height, width):
    """A picture with detail at every scale, so that each pixel and each weight matters."""
    random = np.random.default_rng(height * 1000 + width)
    return Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))


def photos(shared):
    samples = sorted((shared / "data/imagenet_samples").iterdir())[::50]
    clothes = sorted((shared / "data/clothing/validation").glob("*/*"))[::40]
    assert len(samples) >= 8
    assert len(clothes) >= 8
    return [Image.open(path).convert("RGB") for path in samples + clothes]


def timm_pixels(pretrained_cfg, image):
    settings = timm.data.resolve_data_config(pretrained_cfg=pretrained_cfg)
    return timm.data.create_transform(**settings)(image)


def processor(folder, config, model_type=None, backend="pil"):
    """transformers' own image processor for a preprocessor_config.json."""
    folder.mkdir(exist_ok=True)
    (folder / "preprocessor_config.json").write_text(json.dumps(config))
    if model_type:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return transformers.AutoImageProcessor.from_pretrained(folder, backend=backend)


def processed(judge, image):
    return judge(image, return_tensors="pt")["pixel_values"][0]


# timm ---------------------------------------------------------------------------------------------

TIMM: dict[str, dict[str, Any]] = {
    "ViT": {"input_size": [3, 224, 224], "crop_pct": 0.9, "interpolation": "bicubic", **HALF},
    "nothing said": {"classifier": "head"},
    "nulls": {"input_size": None, "crop_pct": None, "crop_mode": None, "mean": None, "std": None},
    "whole": {"input_size": [3, 96, 96], "crop_pct": 1.0, "interpolation": "bilinear"},
    "squash": {"input_size": [3, 96, 160], "crop_pct": 1.0, "crop_mode": "squash"},
    "squash, crop": {"input_size": [3, 160, 96], "crop_pct": 0.95, "crop_mode": "squash"},
    "border": {"input_size": [3, 96, 160], "crop_pct": 1.0, "crop_mode": "border"},
    "border, crop": {"input_size": [3, 96, 96], "crop_pct": 0.9, "crop_mode": "border"},
    "wide": {"input_size": [3, 96, 160], "crop_pct": 0.88},
    "almost square": {"input_size": [3, 96, 97], "crop_pct": 2.5},
    "padded": {"input_size": [3, 97, 97], "crop_pct": 1.2, "interpolation": "nearest"},
}


@pytest.mark.parametrize("name", TIMM)
@pytest.mark.parametrize("shape", SHAPES)
def test_from_timm(name, shape):
    if "border" in name and min(shape) == 1:
        shape = (2, 3)  # timm cannot resize to a height of 0
    expected = timm_pixels(TIMM[name], noise(*shape))
    assert torch.equal(from_timm(TIMM[name])(noise(*shape)), expected)
    assert torch.equal(from_timm({"pretrained_cfg": TIMM[name]})(noise(*shape)), expected)


def test_the_comparison_with_timm_notices():
    expected = timm_pixels(TIMM["ViT"], noise(200, 303))
    assert torch.equal(from_timm(TIMM["ViT"])(noise(200, 303)), expected)
    for change in (
        {"mean": IMAGENET_MEAN},
        {"std": IMAGENET_STD},
        {"interpolation": "bilinear"},
        {"crop_pct": 0.875},
        {"crop_mode": "squash"},
        {"notes": ["centre crop rounded down"]},
    ):
        assert not torch.equal(from_timm(TIMM["ViT"] | change)(noise(200, 303)), expected), change


def test_a_real_model(shared):
    config = json.loads((shared / "weights/vit_tiny_patch16_224/config.json").read_text())
    ours = from_timm(config)
    assert ours == VIT  # 224 / 0.9 = 248.9
    for image in photos(shared):
        assert torch.equal(ours(image), timm_pixels(config["pretrained_cfg"], image))


def test_every_crop_that_timm_publishes_comes_back():
    """The crop_pct that is found need not be the published one; what it is for must be the same."""
    published = {}
    for name in timm.list_models(pretrained=True):
        config = timm.get_pretrained_cfg(name).to_dict()
        key = config["input_size"], config["crop_pct"], config["crop_mode"]
        published[key] = config
    assert len(published) > 50
    for (size, crop_pct, mode), config in published.items():
        ours = from_timm(config)
        back = to_timm(ours)
        assert back["crop_mode"] == mode
        assert back["input_size"] == list(size)
        for side in size[1:]:
            assert math.floor(side / back["crop_pct"]) == math.floor(side / crop_pct)
        assert from_timm(json.loads(json.dumps(back))) == ours
    assert to_timm(VIT)["crop_pct"] == 0.9
    assert to_timm(from_timm({}))["crop_pct"] == 0.875


def test_timm_takes_what_is_written_for_it():
    down = replace(VIT, crop_rounding="down")
    for ours in (VIT, down):
        config = json.loads(json.dumps(to_timm(ours)))
        model = timm.create_model("test_vit", pretrained_cfg=config)
        settings = timm.data.resolve_model_data_config(model)
        assert timm.data.create_transform(**settings)(noise(225, 225)).shape == (3, 224, 224)
        assert from_timm(model.pretrained_cfg) == ours


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"crop_mode": "centre"}, "unknown crop_mode of timm 'centre'; did you mean 'center'"),
        ({"crop_pct": "0.9"}, "timm says crop_pct='0.9'; expected a positive number"),
        ({"crop_pct": -1}, "positive"),
        ({"input_size": [224, 224]}, r"input_size=\[224, 224\] .* expected \(channels, height"),
        ({"input_size": [1, 28, 28]}, "as many numbers in mean as there are channels"),
        ({"interpolation": "random"}, "unknown interpolation 'random'"),
        ({"mean": ["a", "b", "c"]}, "timm says mean="),
    ],
)
def test_from_timm_refuses(config, reason):
    with pytest.raises(ValueError, match=reason):
        from_timm(config)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"fill": "mean"}, "timm has no preprocessing with fill='mean'"),
        ({"crop": (224, 192)}, r"none gives resize=248 with crop=\(224, 192\)"),
        ({"resize": (248, 300), "fit": "contain"}, "none gives"),
        ({"resize": (248, 248), "fit": "contain"}, "fill='black'"),
    ],
)
def test_to_timm_refuses(change, reason):
    with pytest.raises(ValueError, match=reason):
        to_timm(replace(VIT, **change))


# transformers -------------------------------------------------------------------------------------

PROCESSORS: dict[str, dict[str, Any]] = {
    "ViT": {"image_processor_type": "ViTImageProcessor"},
    "DeiT": {"image_processor_type": "DeiTImageProcessor"},
    "BiT": {"image_processor_type": "BitImageProcessor"},
    "CLIP": {"image_processor_type": "CLIPImageProcessor", "size": 96, "crop_size": 96},
    "SigLIP": {"image_processor_type": "SiglipImageProcessor"},
    "DINOv2": {
        "image_processor_type": "BitImageProcessor",
        "crop_size": {"height": 224, "width": 224},
        "do_center_crop": True,
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": list(IMAGENET_MEAN),
        "image_std": list(IMAGENET_STD),
        "resample": 3,
        "rescale_factor": 0.00392156862745098,
        "size": {"shortest_edge": 256},
    },
    "a Fast one": {
        "image_processor_type": "ViTImageProcessorFast",
        "size": {"height": 96, "width": 160},
        "data_format": "channels_first",
        "device": None,
        "do_pad": None,
        "resample": 0,
    },
    "shortest side, wide crop": {
        "image_processor_type": "BitImageProcessor",
        "size": {"shortest_edge": 99},
        "crop_size": {"height": 97, "width": 160},
        "resample": 1,
    },
    "padded": {
        "image_processor_type": "BitImageProcessor",
        "size": {"shortest_edge": 60},
        "crop_size": 97,
    },
    "not normalised": {"image_processor_type": "ViTImageProcessor", "do_normalize": False},
}
# Files from before image processors were named: the model's type decides.
OLD: dict[str, dict[str, Any]] = {
    "vit": {"do_normalize": True, "do_resize": True, "size": 224, "resample": 2},
    "deit": {"do_resize": True, "size": 256, "do_center_crop": True, "crop_size": 224},
    "dinov2": {
        "size": 96,
        "crop_size": 90,
        "image_mean": list(IMAGENET_MEAN),
        "image_std": list(IMAGENET_STD),
    },
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_from_transformers(name, tmp_path):
    judge = processor(tmp_path, PROCESSORS[name])
    ours = from_transformers(PROCESSORS[name])
    for shape in SHAPES:
        assert torch.equal(ours(noise(*shape)), processed(judge, noise(*shape))), shape


@pytest.mark.parametrize("name", ["ViT", "DeiT", "DINOv2"])
def test_from_transformers_on_photos(name, tmp_path, shared):
    judge = processor(tmp_path, PROCESSORS[name])
    for image in photos(shared):
        assert torch.equal(from_transformers(PROCESSORS[name])(image), processed(judge, image))


@pytest.mark.parametrize("model_type", OLD)
def test_old_files_of_transformers(model_type, tmp_path):
    judge = processor(tmp_path, OLD[model_type], model_type)
    ours = from_transformers(OLD[model_type], FAMILIES[model_type].processor)
    for shape in SHAPES:
        assert torch.equal(ours(noise(*shape)), processed(judge, noise(*shape))), shape


def test_feature_extractors_were_image_processors():
    old = {"feature_extractor_type": "DeiTFeatureExtractor"}
    assert from_transformers(old) == from_transformers(PROCESSORS["DeiT"])


@pytest.mark.parametrize(
    "change",
    [
        {"do_rescale": False},
        {"do_rescale": False, "do_normalize": False},
        {"rescale_factor": 1 / 127.5, "image_mean": [1, 1, 1], "image_std": [2, 2, 2]},
    ],
)
def test_other_scales(change, tmp_path):
    """Theirs scales, then normalises; ours has one mean and one std for both: equal but for rounding."""
    config = PROCESSORS["ViT"] | change
    expected = processed(processor(tmp_path, config), noise(200, 301)).float()
    torch.testing.assert_close(from_transformers(config)(noise(200, 301)), expected)
    plain = from_transformers(PROCESSORS["ViT"])(noise(200, 301))
    assert not torch.allclose(plain, expected, atol=0.1)


def test_the_comparison_with_transformers_notices(tmp_path):
    config = PROCESSORS["DINOv2"]
    expected = processed(processor(tmp_path, config), noise(200, 301))
    assert torch.equal(from_transformers(config)(noise(200, 301)), expected)
    for change in (
        {"image_mean": [0.5, 0.5, 0.5]},
        {"image_std": [0.5, 0.5, 0.5]},
        {"resample": 2},
        {"size": {"shortest_edge": 255}},
        {"size": {"height": 256, "width": 256}},
        {"crop_rounding": "even"},  # 256 · 301 / 200 = 385.3, (385 − 224) / 2 = 80.5: see below
        {"do_normalize": False},
    ):
        same = torch.equal(from_transformers(config | change)(noise(200, 301)), expected)
        assert same == ("crop_rounding" in change), change
    # 256 · 303 / 200 = 387.8, (387 − 224) / 2 = 81.5: to the even number, 82, or down, 81
    expected = processed(processor(tmp_path, config), noise(200, 303))
    assert torch.equal(from_transformers(config)(noise(200, 303)), expected)
    even = from_transformers(config | {"crop_rounding": "even"})
    assert not torch.equal(even(noise(200, 303)), expected)


@pytest.mark.parametrize(("name", "most", "mean"), [("ViT", 1, 0.1), ("DeiT", 10, 0.05), ("DINOv2", 3, 0.01)])
def test_how_far_the_torchvision_backend_is(name, most, mean, tmp_path, shared):
    """transformers' faster backend resizes tensors, with other rounding: some of 255 levels apart."""
    judge = processor(tmp_path, PROCESSORS[name], backend="torchvision")
    ours = from_transformers(PROCESSORS[name])
    levels = 255 * torch.tensor(ours.std)[:, None, None]
    apart = torch.stack([(ours(x) - processed(judge, x)).abs() * levels for x in photos(shared)])
    assert apart.max() < most + 0.01
    assert apart.mean() < mean


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"do_resize": False}, "do_resize=false"),
        ({"do_pad": True, "pad_size": 256}, "cannot be done here: do_pad=True, pad_size=256"),
        ({"do_flip_channel_order": True}, "do_flip_channel_order"),
        ({"image_processor_type": "DetrImageProcessor"}, "did you mean '.*ImageProcessor'"),
        ({"size": {"shortest_edge": 8, "longest_edge": 9}}, "size={'shortest_edge': 8, 'longest_"),
        ({"size": {"longest_edge": 8}}, "expected a number, {'shortest_edge'"),
        ({"size": {"shortest_edge": 8}}, "crops nothing.*expected do_center_crop=true"),
        ({"do_center_crop": True}, "crop_size=None"),
        ({"do_center_crop": True, "crop_size": {"shortest_edge": 8}}, "a height and a width"),
        ({"resample": 9}, r"resample=9; expected one of 0 \(nearest\), 1 \(lanczos\)"),
        ({"rescale_factor": 0}, "rescale_factor=0; expected a positive number"),
        ({"image_mean": "half"}, "image_mean='half'; expected numbers"),
        ({"image_std": [0.5, 0.5]}, "std is"),
    ],
)
def test_from_transformers_refuses(config, reason):
    with pytest.raises(ValueError, match=reason):
        from_transformers(PROCESSORS["ViT"] | config)


WRITTEN = {
    "shortest": VIT,
    "shortest, as transformers rounds": replace(VIT, crop_rounding="down"),
    "shortest, wide crop": replace(VIT, crop=(224, 320), interpolation="lanczos"),
    "stretch": Preprocess(resize=(224, 320), interpolation="bilinear", **HALF),
    "stretch, crop": Preprocess(resize=(256, 280), crop=(224, 256), interpolation="box", **HALF),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_to_transformers(name, tmp_path):
    ours = WRITTEN[name]
    judge = processor(tmp_path / "ours", json.loads(json.dumps(to_transformers(ours))))
    judge.save_pretrained(tmp_path / "theirs")
    saved = json.loads((tmp_path / "theirs/preprocessor_config.json").read_text())
    assert from_transformers(saved) == ours, "through transformers' own reading and writing"
    # 248 · 301 / 200 = 373.2, (373 − 224) / 2 = 74.5, (373 − 320) / 2 = 26.5: down is even, too
    assert torch.equal(processed(judge, noise(200, 301)), ours(noise(200, 301)))


def test_transformers_is_at_most_a_pixel_off_where_it_cannot_round_as_we_do(tmp_path):
    judge = processor(tmp_path, to_transformers(VIT))
    # 248 · 303 / 200 = 375.7, (375 − 224) / 2 = 75.5: ours begins at 76, theirs at 75
    ours, theirs = VIT(noise(200, 303)), processed(judge, noise(200, 303))
    assert not torch.equal(ours, theirs)
    assert torch.equal(ours[:, :, :-1], theirs[:, :, 1:])


def test_to_transformers_in_grey(tmp_path):
    ours = Preprocess(resize=(28, 28), interpolation="bilinear", mean=(0.13,), std=(0.31,))
    judge = processor(tmp_path, to_transformers(ours))
    grey = noise(40, 30).convert("L")
    assert torch.equal(ours(grey), processed(judge, grey))
    assert from_transformers(to_transformers(ours)) == ours


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"resize": (248, 300), "fit": "cover"}, "cannot resize with fit='cover'"),
        ({"fill": "mean"}, "transformers has no preprocessing with fill='mean'"),
    ],
)
def test_to_transformers_refuses(change, reason):
    with pytest.raises(ValueError, match=reason):
        to_transformers(replace(VIT, **change))


@pytest.mark.parametrize("name", ["ViT", "nothing said", "whole", "squash", "squash, crop"])
def test_round_trip(name, tmp_path):
    """timm → vitrail → transformers → vitrail → timm, through the files of each."""
    ours = from_timm(TIMM[name])
    processor(tmp_path / "ours", to_transformers(ours)).save_pretrained(tmp_path / "theirs")
    saved = json.loads((tmp_path / "theirs/preprocessor_config.json").read_text())
    last = json.loads(json.dumps(to_timm(from_transformers(saved))))
    for shape in SHAPES:
        image = noise(*shape)
        assert torch.equal(timm_pixels(last, image), timm_pixels(TIMM[name], image))


@pytest.mark.parametrize("name", ["ViT", "DeiT", "BiT", "DINOv2"])
def test_round_trip_from_transformers(name, tmp_path):
    ours = from_transformers(PROCESSORS[name])
    back = to_transformers(from_timm(json.loads(json.dumps(to_timm(ours)))))
    judge, again = processor(tmp_path, PROCESSORS[name]), processor(tmp_path, back)
    for shape in SHAPES:
        assert torch.equal(processed(judge, noise(*shape)), processed(again, noise(*shape)))


# torchvision --------------------------------------------------------------------------------------


def test_all_of_torchvisions_vits():
    published = {}
    for model in ("vit_b_16", "vit_b_32", "vit_l_16", "vit_l_32", "vit_h_14"):
        for weights in torchvision.models.get_model_weights(model):
            published[weights.url.split("/")[-1]] = weights
    assert len(published) == len(TORCHVISION)
    for file, weights in published.items():
        ours, theirs = from_torchvision(file), weights.transforms()
        for shape in [(40, 31), (200, 303)]:
            assert torch.equal(ours(noise(*shape)), theirs(noise(*shape))), file
        wrong = replace(ours, interpolation="lanczos")
        assert not torch.equal(wrong(noise(200, 303)), theirs(noise(200, 303)))


def test_from_torchvision_refuses():
    with pytest.raises(ValueError, match=r"'vit_b16\.pth'; .*expected one of: vit_b_16"):
        from_torchvision("vit_b16.pth")
