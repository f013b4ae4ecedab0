"""Our own form: config.json, which holds everything but tensors, and model.safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitrail.data.preprocess import Preprocess
from vitrail.models.base import Model
from vitrail.models.config import build_config
from vitrail.models.registry import SYSTEMS, describe
from vitrail.weights.adapter import Adapter, Draft
from vitrail.weights.checkpoint import Checkpoint
from vitrail.weights.errors import LoadError
from vitrail.weights.files import plain_name
from vitrail.weights.writing import CONFIG, WEIGHTS, write_json, write_tensors
from vitrail.words import nearest

FORMAT = "vitrail"
VERSION = 1  # goes up when an older Vitrail could no longer read what is written


def is_one(checkpoint: Checkpoint) -> bool:
    """Whether config.json says so, or there are tensors by our names and no config.json."""
    names_alone = not checkpoint.config and "blocks.0.attention_norm.weight" in checkpoint.tensors
    return names_alone or checkpoint.config.get("format") == FORMAT


def read(checkpoint: Checkpoint, asked: Mapping[str, Any]) -> Draft:
    """What config.json says; without one there is no knowing."""
    if not checkpoint.config:
        raise LoadError(
            f"{checkpoint.where} holds Vitrail's tensors without their {CONFIG}: give the whole folder that "
            "vitrail.save wrote. Of a state dict alone, make the model first: "
            "vitrail.create(…).load_state_dict(…), and vitrail.save keeps both together"
        )
    return Draft(table={"*": "*"}, tensors=checkpoint.tensors, **from_description(checkpoint.config))


def from_description(content: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a draft that `description` wrote."""
    if content["version"] > VERSION:
        raise ValueError(
            f"it was written by a newer Vitrail (version {content['version']} of the format; this "
            f"one reads up to {VERSION}): upgrade with pip install --upgrade vitrail"
        )
    if content["system"] not in SYSTEMS:
        raise ValueError(f"system {content['system']!r} is not known; {nearest(content['system'], SYSTEMS)}")
    _, config = SYSTEMS[content["system"]]
    return {
        "system": content["system"],
        "config": build_config(config, content["config"]),
        "preprocess": Preprocess.from_dict(content["preprocess"]),
        "labels": tuple(content["labels"]),
    }


def description(model: Model) -> dict[str, Any]:
    """Everything of a model but its tensors, as JSON."""
    return {"format": FORMAT, "version": VERSION, **describe(model)}


def write(model: Model, folder: Path) -> None:
    """config.json and model.safetensors."""
    write_tensors(folder / WEIGHTS, {plain_name(name): part for name, part in model.state_dict().items()})
    write_json(folder / CONFIG, description(model))


ADAPTER = Adapter(is_one, read, write)
