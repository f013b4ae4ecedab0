"""State dicts of torchvision's VisionTransformer.

Only tensors: how large, how many heads and how pictures are prepared is known for the files that
torchvision publishes, by their names. What we write says it in the metadata of the state dict, which
torchvision leaves alone.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from vitrail.data.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess
from vitrail.models.base import Model
from vitrail.models.config import build_config
from vitrail.models.vit import ViTConfig
from vitrail.weights.adapter import (
    Adapter,
    Draft,
    assumed,
    canonical,
    check_positions,
    check_whole_patches,
    heads_of,
    image_size_of,
    numbered,
    refuse_changed,
)
from vitrail.weights.checkpoint import Checkpoint
from vitrail.weights.errors import SaveError
from vitrail.weights.files import Stored, renamed
from vitrail.weights.names import places, theirs_from_ours
from vitrail.weights.native import description, from_description
from vitrail.weights.preprocessing import from_torchvision

OURS = "vitrail"  # JSON in the metadata
BLOCK = "encoder.layers.encoder_layer_{}."
NAMES = {
    "class_token": "class_token",
    "positions.table": "encoder.pos_embedding",
    "patches.projection.*": "conv_proj.*",
    "blocks.{}.attention_norm.*": f"{BLOCK}ln_1.*",
    "blocks.{}.attention.(query|key|value).*": f"{BLOCK}self_attention.in_proj_*",
    "blocks.{}.attention.output.*": f"{BLOCK}self_attention.out_proj.*",
    "blocks.{}.mlp_norm.*": f"{BLOCK}ln_2.*",
    "blocks.{}.mlp.up.*": f"{BLOCK}mlp.0.*",
    "blocks.{}.mlp.down.*": f"{BLOCK}mlp.3.*",
    "norm.*": "encoder.ln.*",
    "representation.*": "heads.pre_logits.*",
    "head.*": "heads.head.*",
}
OLDER = {r"\.mlp\.linear_1\.": ".mlp.0.", r"\.mlp\.linear_2\.": ".mlp.3."}  # in the published files
# What its constructor takes, and no tensor shows.
FREE = ("heads", "image_size", "dropout", "attention_dropout", "norm_eps", "position_resize")


def is_one(checkpoint: Checkpoint) -> bool:
    """Whether it has the first layers of this library's."""
    return {"conv_proj.weight", "encoder.pos_embedding"} <= checkpoint.tensors.keys()


def read(checkpoint: Checkpoint, asked: Mapping[str, Any]) -> Draft:
    """What our own metadata says, or what follows from the shapes and the file's name."""
    tensors = renamed(checkpoint.tensors, OLDER, checkpoint.where)
    if OURS in checkpoint.metadata:
        return Draft(table=NAMES, tensors=tensors, **from_description(json.loads(checkpoint.metadata[OURS])))
    config = _config(tensors, asked, checkpoint.where)
    guessed = assumed(config, asked, ("heads", "norm_eps"))
    try:
        preprocess = from_torchvision(checkpoint.file.name)
    except ValueError:
        preprocess = Preprocess(
            resize=config.image_size, interpolation="bilinear", mean=IMAGENET_MEAN, std=IMAGENET_STD
        )
        guessed = (*guessed, "the preprocessing (resized, mean and std of ImageNet)")
    return Draft(config, NAMES, tensors, preprocess, guessed=guessed)


def _config(tensors: Mapping[str, Stored], asked: Mapping[str, Any], where: str) -> ViTConfig:
    width, channels, *patch = tensors["conv_proj.weight"].shape
    cells = tensors["encoder.pos_embedding"].shape[1] - 1
    representation = tensors.get("heads.pre_logits.weight")
    return build_config(
        ViTConfig,
        {
            "width": width,
            "depth": numbered(tensors, re.escape(BLOCK).replace(r"\{\}", r"(\d+)")),
            "heads": heads_of(width, asked, where),
            "mlp_width": tensors[BLOCK.format(0) + "mlp.0.weight"].shape[0],
            "patch": patch,
            "image_size": image_size_of((cells,), (patch[0], patch[1]), asked, where),
            "channels": channels,
            "classes": tensors["heads.head.weight"].shape[0],
            "representation": representation.shape[0] if representation else 0,
            "position_resize": "bicubic-corners",
        },
    )


def write(model: Model, file: Path) -> None:
    """A state dict that loads strictly into a VisionTransformer of the same sizes."""
    config: ViTConfig = model.config
    check_whole_patches(config, "torchvision")
    if config.image_size[0] != config.image_size[1] or config.patch[0] != config.patch[1]:
        raise SaveError(
            f"torchvision knows squares only; got image_size={config.image_size}, patch={config.patch}"
        )
    if not config.classes:
        raise SaveError("torchvision always has a head; got classes=0")
    check_positions(config, "torchvision")
    state = model.state_dict()
    tensors = theirs_from_ours(places(NAMES, state, "torchvision"), state)
    stored = {name: Stored(part.shape, part.dtype, part.detach) for name, part in tensors.items()}
    theirs = _config(stored, asdict(config), "torchvision")
    refuse_changed("torchvision", canonical(config), theirs, FREE)
    written = OrderedDict((name, part.detach().cpu().clone()) for name, part in tensors.items())
    vars(written)["_metadata"] = {"": {"version": 1, OURS: json.dumps(description(model))}}
    with file.open("wb") as target:  # which tells why it cannot be written, as torch's own does not
        torch.save(written, target)


ADAPTER = Adapter(is_one, read, write, endings=(".pth", ".pt"))
