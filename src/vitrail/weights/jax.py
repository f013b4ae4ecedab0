"""The original files of google-research/vision_transformer, as .npz.

Such a file is only arrays, and its configuration is in their shapes. What we write has one array more,
ours, with all that shapes cannot tell.

The original code ran these weights with the tanh form of GELU; timm and transformers ship them with
the exact one, and so does this: mlp="gelu-tanh" at load goes back to the original.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.data.preprocess import Preprocess
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
    image_size_of,
    numbered,
    refuse_changed,
)
from vitrail.weights.checkpoint import Checkpoint
from vitrail.weights.errors import SaveError
from vitrail.weights.files import Stored
from vitrail.weights.names import Form, Table, places, theirs_from_ours
from vitrail.weights.native import description, from_description

OURS = "vitrail_config"  # JSON in bytes
TRAINING = "opt/target/"  # before the names of weights in a checkpoint with an optimiser
BLOCK = "Transformer/encoderblock_{}/"
ATTENTION = f"{BLOCK}MultiHeadDotProductAttention_1/"
# What follows from nothing in the file and changes nothing in what it computes at its own size.
FREE = ("dropout", "attention_dropout", "drop_path", "position_resize", "image_size")


def _back(kernel: Tensor, shapes: Sequence[torch.Size]) -> Sequence[Tensor]:
    """(inputs …, outputs …) → (outputs, inputs): whichever of the two is split into heads."""
    (shape,) = shapes
    return [kernel.reshape(shape[1], shape[0]).t()]


KERNEL = Form(join=lambda parts: parts[0].t(), split=_back)
FILTERS = Form(  # (height, width, inputs, outputs)
    join=lambda parts: parts[0].permute(2, 3, 1, 0),
    split=lambda kernel, _: [kernel.permute(3, 2, 0, 1)],
)
CHANNELS = Form(  # (1, 1, 1, channels)
    join=lambda parts: parts[0].view(1, 1, 1, -1),
    split=lambda vector, _: [vector.flatten()],
)


def _names(heads: int) -> Table:
    to_heads = Form(join=lambda parts: parts[0].t().unflatten(1, (heads, -1)), split=_back)
    from_heads = Form(join=lambda parts: parts[0].t().unflatten(0, (heads, -1)), split=_back)
    bias_of_heads = Form(
        join=lambda parts: parts[0].unflatten(0, (heads, -1)),
        split=lambda bias, _: [bias.flatten()],
    )
    table: dict[str, str | tuple[str, Form]] = {
        "class_token": "cls",
        "positions.table": "Transformer/posembed_input/pos_embedding",
        "patches.projection.weight": ("embedding/kernel", FILTERS),
        "patches.projection.bias": "embedding/bias",
        "blocks.{}.attention.output.weight": (f"{ATTENTION}out/kernel", from_heads),
        "blocks.{}.attention.output.bias": f"{ATTENTION}out/bias",
    }
    for part in ("query", "key", "value"):
        table[f"blocks.{{}}.attention.{part}.weight"] = (f"{ATTENTION}{part}/kernel", to_heads)
        table[f"blocks.{{}}.attention.{part}.bias"] = (f"{ATTENTION}{part}/bias", bias_of_heads)
    for ours, theirs in (
        ("blocks.{}.attention_norm", f"{BLOCK}LayerNorm_0"),
        ("blocks.{}.mlp_norm", f"{BLOCK}LayerNorm_2"),
        ("norm", "Transformer/encoder_norm"),
    ):
        table |= {f"{ours}.weight": f"{theirs}/scale", f"{ours}.bias": f"{theirs}/bias"}
    for ours, theirs in (
        ("blocks.{}.mlp.up", f"{BLOCK}MlpBlock_3/Dense_0"),
        ("blocks.{}.mlp.down", f"{BLOCK}MlpBlock_3/Dense_1"),
        ("representation", "pre_logits"),
        ("head", "head"),
    ):
        table |= {f"{ours}.weight": (f"{theirs}/kernel", KERNEL), f"{ours}.bias": f"{theirs}/bias"}
    unit, their_unit = "patches.stem.stages.{}.{}.", "block{+1}/unit{+1}/"
    for filters, norm, theirs, which in (
        ("patches.stem.root.0", "patches.stem.root.1", "", "_root"),
        *((f"{unit}conv{n}", f"{unit}norm{n}", their_unit, f"{n}") for n in (1, 2, 3)),
        (f"{unit}shortcut.0", f"{unit}shortcut.1", their_unit, "_proj"),
    ):
        table |= {
            f"{filters}.weight": (f"{theirs}conv{which}/kernel", FILTERS),
            f"{norm}.weight": (f"{theirs}gn{which}/scale", CHANNELS),
            f"{norm}.bias": (f"{theirs}gn{which}/bias", CHANNELS),
        }
    return table


def is_one(checkpoint: Checkpoint) -> bool:
    """Whether it has the first layer of these files."""
    return not {"embedding/kernel", f"{TRAINING}embedding/kernel"}.isdisjoint(checkpoint.tensors)


def read(checkpoint: Checkpoint, asked: Mapping[str, Any]) -> Draft:
    """What our own array says, or what follows from the shapes."""
    tensors = dict(checkpoint.tensors)
    if f"{TRAINING}embedding/kernel" in tensors:
        tensors = {
            name.removeprefix(TRAINING): stored
            for name, stored in tensors.items()
            if name.startswith(TRAINING)
        }
    tensors = {name: _four_dimensional(name, stored) for name, stored in tensors.items()}
    ours = tensors.pop(OURS, None)
    if ours is None:
        config = _config(tensors, asked, checkpoint.where)
        half = (0.5,) * config.channels
        preprocess = Preprocess(resize=config.image_size, interpolation="bilinear", mean=half, std=half)
        guessed = (*assumed(config, asked, ("norm_eps",)), "the preprocessing (resized, mean 0.5, std 0.5)")
        return Draft(config, _names(config.heads), tensors, preprocess, guessed=guessed)
    content = from_description(json.loads(bytes(ours.read().numpy())))
    return Draft(table=_names(content["config"].heads), tensors=tensors, **content)


def _four_dimensional(name: str, stored: Stored) -> Stored:
    """Group norms have been saved as (1, 1, 1, channels) and as (channels,)."""
    if len(stored.shape) != 1 or "/gn" not in f"/{name}":
        return stored
    shape = torch.Size((1, 1, 1, *stored.shape))
    return stored._replace(shape=shape, read=lambda: stored.read().view(shape))


def _config(tensors: Mapping[str, Stored], asked: Mapping[str, Any], where: str) -> ViTConfig:
    height, width, _, outputs = tensors["embedding/kernel"].shape
    stages = numbered(tensors, r"block(\d+)/")
    units = tuple(numbered(tensors, rf"block{n}/unit(\d+)/") for n in range(1, stages + 1))
    hybrid = "conv_root/kernel" in tensors
    coarser = 4 * 2 ** max(stages - 1, 0) if hybrid else 1
    first = tensors["conv_root/kernel" if hybrid else "embedding/kernel"]
    patch = (height * coarser, width * coarser)
    class_token = "cls" in tensors
    positions = tensors["Transformer/posembed_input/pos_embedding"].shape[1]

    def outputs_of(layer: str) -> int:
        return tensors[f"{layer}/kernel"].shape[1] if f"{layer}/kernel" in tensors else 0

    return build_config(
        ViTConfig,
        {
            "width": outputs,
            "depth": numbered(tensors, BLOCK.format(r"(\d+)")),
            "heads": tensors[ATTENTION.format(0) + "query/kernel"].shape[1],
            "mlp_width": outputs_of(BLOCK.format(0) + "MlpBlock_3/Dense_0"),
            "patch": patch,
            "image_size": image_size_of((positions - class_token,), patch, asked, where),
            "channels": first.shape[2],
            "classes": outputs_of("head"),
            "representation": outputs_of("pre_logits"),
            "class_token": class_token,
            "pool": "class" if class_token else "mean",
            "stem": "resnet" if hybrid else "patch",
            "resnet_units": units,
            "position_resize": "bilinear-corners",
        },
    )


def write(model: Model, file: Path) -> None:
    """The arrays of the original, and ours."""
    config = model.config
    check_positions(config, "npz")
    state = theirs_from_ours(places(_names(config.heads), model.state_dict(), "npz"), model.state_dict())
    if any(tensor.dtype == torch.bfloat16 for tensor in state.values()):
        raise SaveError("npz knows no bfloat16; load with dtype=torch.float32 first")
    stored = {name: Stored(part.shape, part.dtype, part.detach) for name, part in state.items()}
    check_whole_patches(config, "npz")
    refuse_changed("npz", canonical(config), _config(stored, asdict(config), "npz"), FREE)
    text = json.dumps(description(model)).encode()
    arrays: dict[str, Any] = {
        name: np.ascontiguousarray(part.detach().cpu().numpy()) for name, part in state.items()
    }
    arrays[OURS] = np.frombuffer(text, np.uint8)
    with file.open("wb") as target:
        np.savez(target, **arrays)


ADAPTER = Adapter(is_one, read, write, endings=(".npz",))
