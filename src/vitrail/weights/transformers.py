"""transformers: folders of the hub with its ViT, DeiT, DINOv2, and DINOv2 with registers.

The names of tensors are those of the hub's files (versions up to 4, and what later ones write unless
told otherwise); those that version 5 has in memory are understood too.

DeiT without the second head (DeiTModel, DeiTForImageClassification) has a distillation token that
nothing reads: a register, in our terms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitrail.data.preprocess import Preprocess
from vitrail.models.base import Model
from vitrail.models.config import build_config
from vitrail.models.vit import ViTConfig
from vitrail.weights.adapter import Adapter, Draft, check_whole_patches, pair
from vitrail.weights.checkpoint import Checkpoint
from vitrail.weights.errors import LoadError
from vitrail.weights.files import Stored, renamed
from vitrail.weights.names import Table, places, theirs_from_ours
from vitrail.weights.preprocessing import from_transformers, to_transformers
from vitrail.weights.writing import CONFIG, PROCESSOR, WEIGHTS, write_json, write_tensors

LAYER = "encoder.layer.{}."
BODY = {
    "class_token": "embeddings.cls_token",
    "distillation_token": "embeddings.distillation_token",
    "positions.table": "embeddings.position_embeddings",
    "patches.projection.*": "embeddings.patch_embeddings.projection.*",
    "blocks.{}.attention.query.*": f"{LAYER}attention.attention.query.*",
    "blocks.{}.attention.key.*": f"{LAYER}attention.attention.key.*",
    "blocks.{}.attention.value.*": f"{LAYER}attention.attention.value.*",
    "blocks.{}.attention.output.*": f"{LAYER}attention.output.dense.*",
    "norm.*": "layernorm.*",
}
VIT = BODY | {
    "blocks.{}.attention_norm.*": f"{LAYER}layernorm_before.*",
    "blocks.{}.mlp_norm.*": f"{LAYER}layernorm_after.*",
    "blocks.{}.mlp.up.*": f"{LAYER}intermediate.dense.*",
    "blocks.{}.mlp.down.*": f"{LAYER}output.dense.*",
    "representation.*": "pooler.dense.*",
}
DEIT = VIT | {"register_tokens": "embeddings.distillation_token"}
DINO = BODY | {
    "register_tokens": "embeddings.register_tokens",
    "blocks.{}.attention_norm.*": f"{LAYER}norm1.*",
    "blocks.{}.attention_scale.gain": f"{LAYER}layer_scale1.lambda1",
    "blocks.{}.mlp_norm.*": f"{LAYER}norm2.*",
    "blocks.{}.mlp.up.*": f"{LAYER}mlp.fc1.*",
    "blocks.{}.mlp.down.*": f"{LAYER}mlp.fc2.*",
    "blocks.{}.mlp_scale.gain": f"{LAYER}layer_scale2.lambda1",
}
GATED = DINO | {
    "blocks.{}.mlp.up.*": f"{LAYER}mlp.weights_in.*",
    "blocks.{}.mlp.down.*": f"{LAYER}mlp.weights_out.*",
}
# Version 5's names in memory → the hub's.
NEWER = {
    r"^(\w+\.)?layers\.": r"\1encoder.layer.",
    r"\.attention\.q_proj\.": ".attention.attention.query.",
    r"\.attention\.k_proj\.": ".attention.attention.key.",
    r"\.attention\.v_proj\.": ".attention.attention.value.",
    r"\.attention\.o_proj\.": ".attention.output.dense.",
}
NEWER_VIT = {r"\.mlp\.fc1\.": ".intermediate.dense.", r"\.mlp\.fc2\.": ".output.dense."}
NEWER_GATED = {r"\.mlp\.down_proj\.": ".mlp.weights_out."}
# Masks patches in pre-training, and is of no use afterwards.
MASK = "embeddings.mask_token"

# What a model's class is called after its family → a tensor that shows it.
HEADS = {
    "ForImageClassificationWithTeacher": "cls_classifier.weight",
    "ForImageClassification": "classifier.weight",
}
ONE_HEAD = {"head.*": "classifier.*"}
TWO_HEADS = {"head.*": "cls_classifier.*", "distillation_head.*": "distillation_classifier.*"}


class Family(NamedTuple):
    """A model_type: the class of its models, where its tensors lie inside of one with a head, …"""

    name: str
    body: str
    table: Table
    defaults: dict[str, Any]
    processor: str = "ViT"  # the kind of its image processor, a key of preprocessing.PROCESSORS
    resize: str = "bicubic"


# What a config.json leaves out.
DEFAULTS: dict[str, Any] = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "layer_norm_eps": 1e-12,
    "image_size": 224,
    "patch_size": 16,
    "num_channels": 3,
    "qkv_bias": True,
    "pooler_act": "tanh",
}
VIT_DEFAULTS = DEFAULTS | {"intermediate_size": 3072}
DINO_DEFAULTS = DEFAULTS | {
    "layer_norm_eps": 1e-6,
    "mlp_ratio": 4,
    "layerscale_value": 1.0,
    "drop_path_rate": 0.0,
    "use_swiglu_ffn": False,
}
FAMILIES = {
    "vit": Family("ViT", "vit", VIT, VIT_DEFAULTS),
    "deit": Family("DeiT", "deit", DEIT, VIT_DEFAULTS, "DeiT"),
    "dinov2": Family("Dinov2", "dinov2", DINO, DINO_DEFAULTS | {"patch_size": 14}, "Bit"),
    "dinov2_with_registers": Family(
        "Dinov2WithRegisters",
        "dinov2_with_registers",
        DINO,
        DINO_DEFAULTS | {"num_register_tokens": 4},
        "Bit",
        "bicubic-antialias",
    ),
}
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu-tanh",
    "gelu_pytorch_tanh": "gelu-tanh",
    "quick_gelu": "gelu-quick",
    "relu": "relu",
    "silu": "silu",
}


def is_one(checkpoint: Checkpoint) -> bool:
    """Whether config.json says model_type, or there are tensors by these names."""
    names = checkpoint.tensors.keys()
    return "model_type" in checkpoint.config or any(
        name.endswith("embeddings.patch_embeddings.projection.weight") for name in names
    )


def read(checkpoint: Checkpoint, asked: Mapping[str, Any]) -> Draft:
    """What config.json says; without one there is no knowing."""
    where = checkpoint.where
    if not checkpoint.config:
        raise LoadError(
            f"{where} has tensors by transformers' names, but no config.json beside them as "
            "model.safetensors or pytorch_model.bin has: give the whole folder"
        )
    kind = checkpoint.config["model_type"]
    if kind not in FAMILIES:
        raise LoadError(
            f"{where} is transformers' model type {kind!r}; expected one of {', '.join(FAMILIES)}"
        )
    family = FAMILIES[kind]
    content = family.defaults | checkpoint.config
    tensors = _hub_names(checkpoint.tensors, kind, where)
    prefix = f"{family.body}." if any(n.startswith(f"{family.body}.") for n in tensors) else ""
    config = _config(kind, content, tensors, prefix, where)
    check_whole_patches(config, where)
    preprocess, guessed = _preprocess(checkpoint, family, config)
    pooler = () if config.representation else (f"{prefix}pooler.dense.{part}" for part in ("weight", "bias"))
    return Draft(
        config=config,
        table=_names(config, kind, prefix),
        tensors=tensors,
        preprocess=preprocess,
        labels=_labels(content) if config.classes else (),
        unused=frozenset({prefix + MASK}),
        spare=tuple(name for name in pooler if name in tensors),
        guessed=guessed,
    )


def _hub_names(tensors: Mapping[str, Stored], kind: str, where: str) -> dict[str, Stored]:
    """Tensors by the names that files of the hub have."""
    newer = NEWER | (NEWER_GATED if "dinov2" in kind else NEWER_VIT)
    named = renamed(tensors, newer, where)
    for name in [name for name in named if ".mlp.gate_proj." in name]:
        gate, up = named.pop(name), named.pop(name.replace(".gate_proj.", ".up_proj."))
        named[name.replace(".gate_proj.", ".weights_in.")] = Stored(
            torch.Size((gate.shape[0] + up.shape[0], *gate.shape[1:])),
            gate.dtype,
            partial(_joined, gate, up),
        )
    return named


def _joined(*parts: Stored) -> Tensor:
    return torch.cat([part.read() for part in parts])


def _config(
    kind: str, content: Mapping[str, Any], tensors: Mapping[str, Stored], prefix: str, where: str
) -> ViTConfig:
    family = FAMILIES[kind]
    likely = next((head for head, tensor in HEADS.items() if tensor in tensors), "Model")
    architecture = (content.get("architectures") or [family.name + likely])[0]
    head = architecture.removeprefix(family.name)
    dino = "dinov2" in kind
    width, activation = content["hidden_size"], content["hidden_act"]
    image_size = pair(content["image_size"])
    for field, value, fine in (
        ("architectures", architecture, head in {*HEADS, "Model", "Backbone"}),
        ("hidden_act", activation, activation in ACTIVATIONS),
        ("pooler_act", content["pooler_act"], content["pooler_act"] == "tanh"),
        ("quantization_config", content.get("quantization_config"), "quantization_config" not in content),
        # Its positions are resized at every call, and can only be from a square.
        ("image_size", content["image_size"], not dino or image_size[0] == image_size[1]),
        ("head_dim", content.get("head_dim"), "head_dim" not in content),
    ):
        if not fine:
            raise LoadError(f"{where}: config.json says {field}={value!r}, which cannot be honoured here")
    classifies = head.startswith("For")
    pooled = head == "Model" and f"{prefix}pooler.dense.weight" in tensors
    values = {
        "width": width,
        "depth": content["num_hidden_layers"],
        "heads": content["num_attention_heads"],
        "mlp_width": _mlp_width(content) if dino else content["intermediate_size"],
        "patch": pair(content["patch_size"]),
        "image_size": image_size,
        "channels": content["num_channels"],
        "classes": _classes(content) if classifies else 0,
        "pool": "class+mean" if dino and classifies else "class",
        "position_resize": content.get("position_resize", family.resize),
        "mlp": ACTIVATIONS[activation],
        "qkv_bias": content["qkv_bias"],
        "norm_eps": content["layer_norm_eps"],
        "representation": _pooler_width(content) if pooled else 0,
        "dropout": content["hidden_dropout_prob"],
        "attention_dropout": content["attention_probs_dropout_prob"],
    }
    if dino:
        values |= {
            "layer_scale": content["layerscale_value"],
            "drop_path": content["drop_path_rate"],
            "mlp": "swiglu" if content["use_swiglu_ffn"] else values["mlp"],
        }
    if kind == "dinov2_with_registers":
        values |= {"registers": content["num_register_tokens"], "positioned_tokens": 1}
    if kind == "deit":
        teacher = head.endswith("WithTeacher")
        values |= {"distillation_token": teacher, "registers": 0 if teacher else 1}
    return build_config(ViTConfig, values)


def _preprocess(
    checkpoint: Checkpoint, family: Family, config: ViTConfig
) -> tuple[Preprocess, tuple[str, ...]]:
    """What preprocessor_config.json says; without one, and then as a guess, what such models usually have."""
    preprocess = from_transformers(checkpoint.processor, family.processor)
    if checkpoint.processor:
        return preprocess, ()
    mean, std = (values[: config.channels] for values in (preprocess.mean, preprocess.std))
    usual = replace(preprocess, mean=mean, std=std).resized_to(*config.image_size)
    return usual, (f"the preprocessing (no {PROCESSOR}: the defaults of {family.processor}ImageProcessor)",)


def _classes(content: Mapping[str, Any]) -> int:
    """As many as have names, which is two where config.json says nothing."""
    named = content.get("id2label")
    return content.get("num_labels", 2) if named is None else len(named)


def _pooler_width(content: Mapping[str, Any]) -> int:
    return content.get("pooler_output_size") or content["hidden_size"]


def _mlp_width(content: Mapping[str, Any]) -> int:
    """As DINOv2 rounds it: two thirds, to a multiple of eight, where it is gated."""
    hidden = int(content["hidden_size"] * content["mlp_ratio"])
    return (int(hidden * 2 / 3) + 7) // 8 * 8 if content["use_swiglu_ffn"] else hidden


def _labels(content: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the classes, unless they are only numbered."""
    by_number = {int(number): label for number, label in (content.get("id2label") or {}).items()}
    labels = tuple(by_number[number] for number in range(len(by_number)))
    return () if labels == _numbered(len(labels)) else labels


def _numbered(classes: int) -> tuple[str, ...]:
    return tuple(f"LABEL_{number}" for number in range(classes))


def _names(config: ViTConfig, kind: str, prefix: str) -> Table:
    table = GATED if config.mlp == "swiglu" else FAMILIES[kind].table
    heads = TWO_HEADS if config.distillation_token else ONE_HEAD
    return {ours: f"{prefix}{theirs}" for ours, theirs in table.items()} | heads


def write(model: Model, folder: Path) -> None:
    """What AutoModelForImageClassification and AutoImageProcessor read; AutoModel if it is for features."""
    config: ViTConfig = model.config
    kind = _kind(config)
    family = FAMILIES[kind]
    head = "ForImageClassification"  # with no classes, its head does nothing
    if config.distillation_token:
        head = "ForImageClassificationWithTeacher"
    elif config.representation or ("dinov2" in kind and not config.classes and config.pool == "class"):
        head = "Model"
    prefix = "" if head == "Model" else f"{family.body}."
    state = model.state_dict()
    tensors = theirs_from_ours(
        places(_names(config, kind, prefix), state, f"transformers' {family.name}"), state
    )
    if "dinov2" in kind:
        tensors[prefix + MASK] = _no_mask(tensors[f"{prefix}embeddings.cls_token"])
    labels = model.labels or _numbered(config.classes)
    activations = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    content = {
        "architectures": [family.name + head],
        "model_type": kind,
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "hidden_act": activations.get(config.mlp, "gelu"),
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "layer_norm_eps": config.norm_eps,
        "image_size": _one_or_two(config.image_size),
        "patch_size": _one_or_two(config.patch),
        "num_channels": config.channels,
        "qkv_bias": config.qkv_bias,
        "position_resize": config.position_resize,  # nothing that transformers would read
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "label2id": {label: number for number, label in enumerate(labels)},
    }
    if "dinov2" in kind:
        share = 3 / 2 if config.mlp == "swiglu" else 1
        content |= {
            "mlp_ratio": round(config.mlp_width * share / config.width),
            "use_swiglu_ffn": config.mlp == "swiglu",
            "layerscale_value": config.layer_scale,
            "drop_path_rate": config.drop_path,
        }
    else:
        content |= {"intermediate_size": config.mlp_width}
    if config.representation:
        content |= {"pooler_output_size": config.representation}
    if kind == "dinov2_with_registers":
        content |= {"num_register_tokens": config.registers}
    write_tensors(folder / WEIGHTS, tensors)
    write_json(folder / CONFIG, content)
    write_json(folder / PROCESSOR, to_transformers(model.preprocess))


def _kind(config: ViTConfig) -> str:
    """The nearest family; what it cannot say shows when what was written is read again."""
    if config.layer_scale is not None:
        return "dinov2_with_registers" if config.registers else "dinov2"
    return "deit" if config.distillation_token or config.registers else "vit"


def _no_mask(class_token: Tensor) -> Tensor:
    return torch.zeros_like(class_token[0])


def _one_or_two(size: tuple[int, int]) -> int | list[int]:
    return size[0] if size[0] == size[1] else list(size)


ADAPTER = Adapter(is_one, read, write)
