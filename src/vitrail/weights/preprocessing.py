"""The preprocessing that other libraries publish with their weights, in and out.

What one of them cannot say is refused, with one exception: timm and transformers round a centre
crop differently, by at most one pixel, and have no word for it. It is written where the other
library lets it stand unread, so that it comes back unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import PurePath
from typing import Any

from vitrail.data.preprocess import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    INTERPOLATIONS,
    Preprocess,
    crop_fraction,
    sides_before_crop,
)
from vitrail.weights.writing import PROCESSOR
from vitrail.words import unknown

HALF = (0.5, 0.5, 0.5)
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)

# timm ---------------------------------------------------------------------------------------------

TIMM_DEFAULTS: dict[str, Any] = {
    "input_size": (3, 224, 224),
    "interpolation": "bicubic",
    "crop_pct": 0.875,
    "crop_mode": "center",
    "mean": IMAGENET_MEAN,
    "std": IMAGENET_STD,
    "notes": (),
}
# timm's crop_mode → our fit and fill. To "cover" a square is what we call "shortest".
TIMM_CROPS = {
    "center": ("cover", "black"),
    "squash": ("stretch", "black"),
    "border": ("contain", "mean"),
}
TIMM_MODES = {"shortest": "center", "cover": "center", "stretch": "squash", "contain": "border"}
ROUNDED_DOWN = "centre crop rounded down"  # among timm's notes, which are free text


def from_timm(pretrained_cfg: Mapping[str, Any]) -> Preprocess:
    """timm's preprocessing to evaluate with, from `pretrained_cfg` or the config.json around it."""
    given = pretrained_cfg.get("pretrained_cfg", pretrained_cfg)
    config = TIMM_DEFAULTS | {key: given[key] for key in TIMM_DEFAULTS if given.get(key)}
    size = _numbers("timm", config, "input_size")
    mean, std = _numbers("timm", config, "mean"), _numbers("timm", config, "std")
    if len(size) != 3 or size[0] != len(mean):
        raise ValueError(
            f"timm says input_size={config['input_size']} and mean={config['mean']}; expected "
            "(channels, height, width) and as many numbers in mean as there are channels"
        )
    mode = config["crop_mode"]
    if mode not in tuple(TIMM_CROPS):
        raise ValueError(unknown("crop_mode of timm", mode, TIMM_CROPS))
    fit, fill = TIMM_CROPS[mode]
    resize, fit = sides_before_crop(size[1:], _positive("timm", config, "crop_pct"), fit)
    return Preprocess(
        resize=resize,
        crop=size[1:],
        interpolation=config["interpolation"],
        mean=mean,
        std=std,
        fit=fit,
        crop_rounding="down" if ROUNDED_DOWN in config["notes"] else "even",
        fill=fill,
    )


def to_timm(preprocess: Preprocess) -> dict[str, Any]:
    """The part of timm's `pretrained_cfg` that tells how pictures are prepared."""
    fraction = crop_fraction(preprocess.size, preprocess.sides)
    if fraction is None:
        raise ValueError(
            f"timm has one crop_pct for height and width; none gives resize={preprocess.resize} "
            f"with crop={preprocess.size}; use preprocess.resized_to(height, width) first"
        )
    config: dict[str, Any] = {
        "input_size": [len(preprocess.mean), *preprocess.size],
        "interpolation": preprocess.interpolation,
        "crop_pct": fraction,
        "crop_mode": TIMM_MODES[preprocess.fit],
        "mean": list(preprocess.mean),
        "std": list(preprocess.std),
    }
    if preprocess.crop_rounding == "down":
        config["notes"] = [ROUNDED_DOWN]
    _refuse_if_changed("timm", preprocess, from_timm(config))
    return config


# transformers -------------------------------------------------------------------------------------

_PROCESSOR: dict[str, Any] = {
    "do_resize": True,
    "do_center_crop": False,
    "crop_size": None,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "default_to_square": True,
    "crop_rounding": "down",
}
_CLIP: dict[str, Any] = _PROCESSOR | {
    "size": {"shortest_edge": 224},
    "default_to_square": False,
    "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224},
    "resample": 3,
    "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD,
}
_VIT: dict[str, Any] = _PROCESSOR | {
    "size": {"height": 224, "width": 224},
    "resample": 2,
    "image_mean": HALF,
    "image_std": HALF,
}
# What a preprocessor_config.json leaves out, by the kind of its image processor.
PROCESSORS: dict[str, dict[str, Any]] = {
    "ViT": _VIT,
    "DeiT": _VIT
    | {
        "size": {"height": 256, "width": 256},
        "resample": 3,
        "do_center_crop": True,
        "crop_size": {"height": 224, "width": 224},
    },
    "Bit": _CLIP,
    "CLIP": _CLIP,
    "Siglip": _VIT | {"resample": 3, "default_to_square": False},
}
# Keys that do not change the pixels.
IGNORED = {
    "image_processor_type",
    "feature_extractor_type",
    "processor_class",
    "do_convert_rgb",
    "data_format",
    "input_data_format",
    "return_tensors",
    "device",
    "disable_grouping",
    "image_seq_length",
    "model_input_names",
    "_valid_processor_keys",
}


def from_transformers(preprocessor_config: Mapping[str, Any], usual: str = "ViT") -> Preprocess:
    """transformers' preprocessing, from a preprocessor_config.json.

    usual: the kind of image processor (a key of PROCESSORS) that an old file means, which names none.
    """
    given = {key: value for key, value in preprocessor_config.items() if value is not None}
    kind = _kind(given, usual)
    config = PROCESSORS[kind] | given
    foreign = {
        key: value
        for key, value in config.items()
        if key not in PROCESSORS[kind].keys() | IGNORED and value is not False
    }
    if foreign:
        told = ", ".join(f"{key}={value!r}" for key, value in foreign.items())
        raise ValueError(f"{PROCESSOR} asks for what cannot be done here: {told}")
    if not config["do_resize"]:
        raise ValueError(f"{PROCESSOR} says do_resize=false; expected a size to resize to")

    resampling = {int(method): name for name, method in INTERPOLATIONS.items()}
    if config["resample"] not in resampling:
        raise ValueError(
            f"{PROCESSOR} says resample={config['resample']!r}; expected one of "
            + ", ".join(f"{number} ({name})" for number, name in sorted(resampling.items()))
        )
    crop = _sides(config["crop_size"], "crop_size") if config["do_center_crop"] else None
    if isinstance(crop, int):
        raise ValueError(f"crop_size is {config['crop_size']!r}; expected a height and a width")
    resize = _sides(config["size"], "size", square=config["default_to_square"])
    if isinstance(resize, int) and crop is None:
        raise ValueError(
            f"{PROCESSOR} resizes the shortest side to {resize} and crops nothing: "
            "pictures come in different sizes; expected do_center_crop=true and a crop_size"
        )
    # Theirs is (value · factor − mean) / std of values to 255, ours (value / 255 − mean) / std.
    factor = _positive(PROCESSOR, config, "rescale_factor") if config["do_rescale"] else 1.0
    unit = 255 * factor
    mean = _numbers(PROCESSOR, config, "image_mean")
    std = _numbers(PROCESSOR, config, "image_std")
    if not config["do_normalize"]:
        mean, std = (0.0,) * len(mean), (1.0,) * len(std)
    return Preprocess(
        resize=resize,
        crop=crop,
        interpolation=resampling[config["resample"]],
        mean=tuple(value / unit for value in mean),
        std=tuple(value / unit for value in std),
        crop_rounding=config["crop_rounding"] if crop else "even",
    )


def to_transformers(preprocess: Preprocess) -> dict[str, Any]:
    """A preprocessor_config.json that transformers' AutoImageProcessor reads."""
    height, width = preprocess.size
    tall, wide = preprocess.sides
    shapes: dict[str, tuple[str, dict[str, int]]] = {
        "shortest": ("Bit", {"shortest_edge": tall}),
        "stretch": ("DeiT" if preprocess.crop else "ViT", {"height": tall, "width": wide}),
    }
    if preprocess.fit not in shapes:
        raise ValueError(
            f"transformers cannot resize with fit={preprocess.fit!r}; it knows the shortest side "
            "(resize=number) and exactly (height, width)"
        )
    kind, size = shapes[preprocess.fit]
    config = {
        "image_processor_type": f"{kind}ImageProcessor",
        "do_resize": True,
        "size": size,
        "resample": int(INTERPOLATIONS[preprocess.interpolation]),
        "do_center_crop": preprocess.crop is not None,
        "crop_size": {"height": height, "width": width},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(preprocess.mean),
        "image_std": list(preprocess.std),
        "do_convert_rgb": len(preprocess.mean) == 3,
        "crop_rounding": preprocess.crop_rounding,
    }
    _refuse_if_changed("transformers", preprocess, from_transformers(config))
    return config


def _kind(config: Mapping[str, Any], usual: str) -> str:
    """The image processor's name without what differs between versions and backends."""
    name = config.get("image_processor_type") or config.get("feature_extractor_type") or usual
    kind = re.sub(r"(ImageProcessor|FeatureExtractor)(Fast|Pil)?$", "", str(name))
    if kind not in PROCESSORS:
        raise ValueError(unknown("image_processor_type", name, [f"{k}ImageProcessor" for k in PROCESSORS]))
    return kind


def _sides(size: Any, key: str, square: bool = True) -> int | tuple[int, int]:
    """A size as any version of transformers writes it: the shortest side, or (height, width)."""
    match size:
        case int():
            return (size, size) if square else size
        case {"shortest_edge": shortest} if len(size) == 1:
            return shortest
        case {"height": height, "width": width} | [height, width] if len(size) == 2:
            return height, width
    raise ValueError(
        f"{PROCESSOR} says {key}={size!r}; expected a number, "
        "{'shortest_edge': …} or {'height': …, 'width': …}"
    )


# torchvision --------------------------------------------------------------------------------------

# Its published files → shortest side, crop, interpolation.
TORCHVISION = {
    "vit_b_16": (256, 224, "bilinear"),
    "vit_b_16_swag": (384, 384, "bicubic"),
    "vit_b_16_lc_swag": (224, 224, "bicubic"),
    "vit_b_32": (256, 224, "bilinear"),
    "vit_l_16": (242, 224, "bilinear"),
    "vit_l_16_swag": (512, 512, "bicubic"),
    "vit_l_16_lc_swag": (224, 224, "bicubic"),
    "vit_l_32": (256, 224, "bilinear"),
    "vit_h_14_swag": (518, 518, "bicubic"),
    "vit_h_14_lc_swag": (224, 224, "bicubic"),
}


def from_torchvision(file: str) -> Preprocess:
    """The preprocessing of weights that torchvision published: vit_b_16-c867db91.pth, say."""
    name = re.sub(r"-[0-9a-f]{8}$", "", PurePath(file).stem)
    if name not in TORCHVISION:
        raise ValueError(unknown("file of torchvision's weights", file, TORCHVISION))
    resize, crop, interpolation = TORCHVISION[name]
    return Preprocess(
        resize=resize,
        crop=(crop, crop),
        interpolation=interpolation,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    )


# what they share ----------------------------------------------------------------------------------


def _numbers(where: str, config: Mapping[str, Any], key: str) -> tuple[Any, ...]:
    """The list of numbers there; one number stands for all three channels."""
    value = config[key]
    numbers = tuple(value) if isinstance(value, (list, tuple)) else (value,) * 3
    if not all(isinstance(number, (int, float)) for number in numbers):
        raise ValueError(f"{where} says {key}={value!r}; expected numbers")
    return numbers


def _positive(where: str, config: Mapping[str, Any], key: str) -> float:
    value = config[key]
    if not isinstance(value, (int, float)) or not value > 0:
        raise ValueError(f"{where} says {key}={value!r}; expected a positive number")
    return value


def _refuse_if_changed(library: str, ours: Preprocess, theirs: Preprocess) -> None:
    """What does not come back as it went cannot be said in that library's terms."""
    back = asdict(theirs)
    lost = [f"{name}={value!r}" for name, value in asdict(ours).items() if back[name] != value]
    if lost:
        raise ValueError(f"{library} has no preprocessing with {', '.join(lost)}")
