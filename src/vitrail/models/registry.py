"""The table of systems: a paper's name → what is built."""

from __future__ import annotations

import re
from dataclasses import asdict
from math import floor
from typing import Any

from vitrail.data.preprocess import Preprocess
from vitrail.models.base import Model
from vitrail.models.config import build_config
from vitrail.models.vit import SIZES, ViT, ViTConfig
from vitrail.words import nearest

# What config.json calls a system → the class of its model and of its config.
SYSTEMS: dict[str, tuple[type[Model], type[Any]]] = {"vit": (ViT, ViTConfig)}


def _sized(size: str, **more: Any) -> dict[str, Any]:
    width, depth, heads, mlp_width = SIZES[size]
    return {"width": width, "depth": depth, "heads": heads, "mlp_width": mlp_width, **more}


_DEIT = {"distillation_token": True}
_DINO = {"classes": 0, "image_size": 518, "layer_scale": 1e-5}
_DINO_REGISTERS = {**_DINO, "registers": 4, "positioned_tokens": 1}

# name without its patch → (the patch sizes of the papers, the fields that differ from the defaults)
TABLE: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "vit-ti": ((16,), _sized("ti")),
    "vit-s": ((16, 32), _sized("s")),
    "vit-b": ((8, 16, 32), _sized("b")),
    "vit-l": ((14, 16, 32), _sized("l")),
    "vit-h": ((14,), _sized("h")),
    "vit-r26+s": ((32,), _sized("s", stem="resnet", resnet_units=(2, 2, 2, 2))),
    "vit-r50+b": ((16,), _sized("b", stem="resnet", resnet_units=(3, 4, 9))),
    "vit-r50+l": ((32,), _sized("l", stem="resnet", resnet_units=(3, 4, 6, 3))),
    "deit-ti": ((16,), _sized("ti", **_DEIT)),
    "deit-s": ((16,), _sized("s", **_DEIT)),
    "deit-b": ((16,), _sized("b", **_DEIT)),
    **{
        f"dinov2-{registers}{size}": (
            (14,),
            _sized(size, **more, **({"mlp": "swiglu"} if size == "g" else {})),
        )
        for registers, more in (("", _DINO), ("reg-", _DINO_REGISTERS))
        for size in ("s", "b", "l", "g")
    },
}


def names() -> list[str]:
    """Every name of the papers; `create` takes these with any other patch size too, as in vit-s/7."""
    return [f"{stem}/{patch}" for stem, (patches, _) in TABLE.items() for patch in patches]


def create(name: str, *, labels: tuple[str, ...] = (), **changes: Any) -> Model:
    """A new model by its paper's name, with random weights.

    labels: names of the classes, which then also say how many there are. changes: any field of the
    system's config, such as classes=10, image_size=(224, 320), registers=4, pool="mean".
    """
    config = config_of(name, **({"classes": len(labels)} if labels else {}) | changes)
    return build("vit", config, labels=tuple(labels))


def config_of(name: str, **changes: Any) -> ViTConfig:
    """The config behind a paper's name, with some fields changed."""
    match = re.fullmatch(r"(.+)/(\d+)", name.lower())
    if match is None or match[1] not in TABLE:
        raise ValueError(f"no model is called {name!r}; {nearest(name, names())}")
    row = {**TABLE[match[1]][1], "patch": int(match[2])}
    return build_config(ViTConfig, {**row, **changes})


def build(
    system: str, config: Any, *, preprocess: Preprocess | None = None, labels: tuple[str, ...] = ()
) -> Model:
    """A model of a system from its config; preprocessing as the ViT paper's unless given."""
    if labels and len(labels) != config.classes:
        raise ValueError(f"{len(labels)} labels were given for {config.classes} classes")
    model, _ = SYSTEMS[system]
    preprocess = preprocess or paper_preprocess(config.image_size, config.channels)
    return model(config, preprocess, labels)


def paper_preprocess(image_size: tuple[int, int], channels: int) -> Preprocess:
    """Values from -1 to 1 as the ViT paper's; of a square the middle 90 %, otherwise all, stretched.

    That is what every library that weights go out to can say.
    """
    square = image_size[0] == image_size[1]
    half = (0.5,) * channels
    return Preprocess(
        resize=floor(image_size[0] / 0.9) if square else image_size,
        crop=image_size if square else None,
        interpolation="bicubic",
        mean=half,
        std=half,
    )


def describe(model: Model) -> dict[str, Any]:
    """What config.json holds of a model: system, config, preprocessing, labels."""
    (system,) = (name for name, (kind, _) in SYSTEMS.items() if type(model) is kind)
    return {
        "system": system,
        "config": asdict(model.config),
        "preprocess": model.preprocess.to_dict(),
        "labels": list(model.labels),
    }
