"""timm: folders of the hub (config.json and model.safetensors), and state dicts alone.

Its config.json names an architecture and what differs from it; what the names mean is in RULES. The
rest is in the shapes of the tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitrail.models.base import Model
from vitrail.models.config import build_config
from vitrail.models.vit import ViTConfig
from vitrail.weights.adapter import (
    Adapter,
    Draft,
    check_whole_patches,
    heads_of,
    image_sizes_of,
    numbered,
    pair,
)
from vitrail.weights.checkpoint import Checkpoint
from vitrail.weights.errors import LoadError
from vitrail.weights.files import Stored, renamed
from vitrail.weights.names import places, theirs_from_ours
from vitrail.weights.preprocessing import from_timm, to_timm
from vitrail.weights.writing import CONFIG, WEIGHTS, write_json, write_tensors

STEM = "patch_embed.backbone."
NAMES = {
    "class_token": "cls_token",
    "distillation_token": "dist_token",
    "register_tokens": "reg_token",
    "positions.table": "pos_embed",
    "patches.projection.*": "patch_embed.proj.*",
    "patches.stem.root.0.*": f"{STEM}stem.conv.*",
    "patches.stem.root.1.*": f"{STEM}stem.norm.*",
    "patches.stem.stages.{}.{}.shortcut.0.*": f"{STEM}stages.{{}}.blocks.{{}}.downsample.conv.*",
    "patches.stem.stages.{}.{}.shortcut.1.*": f"{STEM}stages.{{}}.blocks.{{}}.downsample.norm.*",
    "patches.stem.stages.{}.{}.*": f"{STEM}stages.{{}}.blocks.{{}}.*",
    "blocks.{}.attention_norm.*": "blocks.{}.norm1.*",
    "blocks.{}.attention.(query|key|value).*": "blocks.{}.attn.qkv.*",
    "blocks.{}.attention.query_norm.*": "blocks.{}.attn.q_norm.*",
    "blocks.{}.attention.key_norm.*": "blocks.{}.attn.k_norm.*",
    "blocks.{}.attention.output.*": "blocks.{}.attn.proj.*",
    "blocks.{}.attention_scale.gain": "blocks.{}.ls1.gamma",
    "blocks.{}.mlp_norm.*": "blocks.{}.norm2.*",
    "blocks.{}.mlp.up.*": "blocks.{}.mlp.fc1.*",
    "blocks.{}.mlp.down.*": "blocks.{}.mlp.fc2.*",
    "blocks.{}.mlp_scale.gain": "blocks.{}.ls2.gamma",
    "pre_norm.*": "norm_pre.*",
    "norm.*": "norm.*",
    "attention_pooling.query": "attn_pool.latent",
    "attention_pooling.attention.query.*": "attn_pool.q.*",
    "attention_pooling.attention.(key|value).*": "attn_pool.kv.*",
    "attention_pooling.attention.output.*": "attn_pool.proj.*",
    "attention_pooling.norm.*": "attn_pool.norm.*",
    "attention_pooling.mlp.up.*": "attn_pool.mlp.fc1.*",
    "attention_pooling.mlp.down.*": "attn_pool.mlp.fc2.*",
    "head.*": "head.*",
    "distillation_head.*": "head_dist.*",
}
OLDER = {r"\.gamma_(\d)$": r".ls\1.gamma"}  # the layer scale in DeiT III's own files

# The word for a size in an architecture's name → embed_dim, depth, num_heads.
SIZES = {
    "xsmall": (256, 10, 4),
    "tiny": (192, 12, 3),
    "wee": (256, 14, 4),
    "little": (320, 14, 5),
    "small": (384, 12, 6),
    "medium": (512, 12, 8),
    "mediumd": (512, 20, 8),
    "betwixt": (640, 12, 10),
    "base": (768, 12, 12),
    "so150m": (896, 18, 14),
    "so150m2": (832, 21, 13),
    "large": (1024, 24, 16),
    "so400m": (1152, 27, 16),
    "huge": (1280, 32, 16),
    "giant": (1408, 40, 16),
    "giantopt": (1536, 40, 16),
    "gigantic": (1664, 48, 16),
}
# The architectures that RULES are about, by their whole names: others begin alike, and some have the very
# same tensors and compute something else with them.
SIZE = "|".join(SIZES)
KNOWN = re.compile(
    rf"""
    vit_({SIZE})_patch\d+(_plus|_36x1)?_\d+ (_miil)?(_in21k|_sam|_dino)?
    | vit_({SIZE})_patch\d+ (_reg[14])?_(gap|map)_\d+
    | vit_({SIZE})_patch\d+_siglip (_gap)?_\d+
    | vit_({SIZE})_patch\d+ (_plus)?_clip (_quickgelu)?_\d+
    | vit_({SIZE})_patch\d+ (_reg4_dinov2|_dinov2|_reg1_tipsv2)
    | vit_({SIZE})_(r_s16_p8|r26_s32|r50_s16|r50_s32)_\d+ (_in21k)?
    | deit_({SIZE}) (_distilled)?_patch\d+_\d+
    | deit3_({SIZE})_patch\d+_\d+ (_in21ft1k)?
    | flexivit_({SIZE})
    | eva_large_patch14_\d+
    """,
    re.VERBOSE,
)
# What other names mean that is not to be had here.
OTHERS = {
    r"_rope_|_dinov3|_lingbot|_sapiens2|^vit_pe_|^eva02_": "rotary positions, or another network of EVA's",
    r"_s?relpos_": "relative positions",
    r"_rpn_": "norms after attention and MLP, not before",
    r"_xp_|_18x2_|_d?pwee_": "blocks whose parts are computed side by side",
    r"_d(wee|little)_": "differential attention",
    r"_mci_|_resnet\d": "another stem",
}
CLIP, CLIP_EPS = "vit_base_patch16_clip_224", 1e-5  # an architecture to write, for this epsilon of its norms
# What else an architecture's name says, in timm's arguments; a later row has the last word.
RULES: tuple[tuple[str, dict[str, Any]], ...] = (
    *(
        (rf"_{size}(_|$)", {"embed_dim": width, "depth": depth, "num_heads": heads})
        for size, (width, depth, heads) in SIZES.items()
    ),
    (r"_giant_.*(dinov2|tipsv2)", {"embed_dim": 1536, "num_heads": 24}),
    (r"_plus_", {"embed_dim": 896, "num_heads": 14}),
    (r"_36x1_", {"depth": 36}),
    (r"^vit_base_patch16_gap_", {"num_heads": 16}),
    (r"_reg1_", {"reg_tokens": 1}),
    (r"_reg4_", {"reg_tokens": 4}),
    (r"_(gap|map|siglip)_", {"class_token": False}),
    (r"_(map|siglip)_", {"global_pool": "map"}),
    (r"_gap_|^eva_", {"global_pool": "avg"}),
    (r"base_patch32_siglip|giantopt|(large|so400m)_patch16_siglip(_gap)?_512", {"act_layer": "gelu_tanh"}),
    (r"so400m_patch16_siglip", {"act_layer": "gelu_tanh"}),
    (r"_clip_", {"pre_norm": True, "norm_eps": CLIP_EPS}),
    (r"_clip_quickgelu_", {"act_layer": "quick_gelu"}),
    (r"distilled", {"distilled": True}),
    (r"_r_s16_", {"units": ()}),
    (r"_r26_s32_", {"units": (2, 2, 2, 2)}),
    (r"_r50_s16_", {"units": (3, 4, 9)}),
    (r"_r50_s32_", {"units": (3, 4, 6, 3)}),
)
# Architectures to write: the plain one nearest in size, and those that only an own name can say.
HYBRIDS = {
    (): "vit_tiny_r_s16_p8_224",
    (2, 2, 2, 2): "vit_small_r26_s32_224",
    (3, 4, 9): "vit_base_r50_s16_224",
    (3, 4, 6, 3): "vit_large_r50_s32_224",
}
PLAIN = {192: "tiny", 384: "small", 768: "base", 1024: "large"}

POOLS = {"token": "class", "avg": "mean", "map": "attention"}
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_tanh": "gelu-tanh",
    "quick_gelu": "gelu-quick",
    "relu": "relu",
    "silu": "silu",
}
DROPS = {"proj_drop_rate": "dropout", "attn_drop_rate": "attention_dropout", "drop_path_rate": "drop_path"}
# Arguments whose value says nothing that is not in the tensors, or matters only in training's beginning.
IGNORED = {
    "mlp_ratio", "qkv_bias", "qk_norm", "fc_norm", "no_embed_class", "pos_embed", "pos_drop_rate",
    "dynamic_img_size", "dynamic_img_pad", "strict_img_size", "weight_init", "fix_init",
}  # fmt: skip
# Arguments that are fine with this value, and cannot be honoured with another.
NEUTRAL = {
    "final_norm": True,
    "proj_bias": True,
    "scale_attn_norm": False,
    "scale_mlp_norm": False,
    "norm_layer": "layernorm",
    "drop_rate": 0.0,
    "patch_drop_rate": 0.0,
    "pool_include_prefix": False,
}
HONOURED = {
    "embed_dim", "depth", "num_heads", "patch_size", "img_size", "in_chans", "num_classes",
    "global_pool", "class_token", "reg_tokens", "init_values", "act_layer", "pre_norm", *DROPS,
}  # fmt: skip


def is_one(checkpoint: Checkpoint) -> bool:
    """Whether config.json names an architecture, or there are tensors by timm's names."""
    first = {"patch_embed.proj.weight", "blocks.0.norm1.weight"}
    return "architecture" in checkpoint.config or first <= checkpoint.tensors.keys()


def read(checkpoint: Checkpoint, asked: Mapping[str, Any]) -> Draft:
    """What config.json and the shapes say, or the shapes alone."""
    content, where = checkpoint.config, checkpoint.where
    tensors = renamed(checkpoint.tensors, OLDER, where)
    around = content.get("pretrained_cfg", content)
    if content:
        arguments = _arguments(content, where)
    else:
        width = tensors["patch_embed.proj.weight"].shape[0]
        arguments = {"num_heads": heads_of(width, asked, where)}
        if "norm_pre.weight" in tensors:
            arguments["norm_eps"] = CLIP_EPS
    config, sizes = _config(tensors, arguments, asked, where)
    labels = content.get("label_names") or around.get("label_names") or around.get("labels") or ()
    if not config.classes:  # a model cut off before its head still carries their names
        labels = ()
    preprocess = None
    if content:
        preprocess = from_timm(content)
        if around.get("fixed_input_size") and preprocess.size != config.image_size:
            preprocess = preprocess.resized_to(*config.image_size)
    return Draft(
        config=config,
        table=_names(config),
        tensors=tensors,
        preprocess=preprocess,
        labels=tuple(labels.values() if isinstance(labels, dict) else labels),
        guessed=() if content else _assumed(config, sizes, asked),
    )


def _arguments(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """timm's arguments: what the architecture's name means, then what config.json says."""
    architecture = content["architecture"].partition(".")[0]
    around = content.get("pretrained_cfg", content)
    arguments: dict[str, Any] = {"global_pool": "token"}
    for pattern, meaning in RULES:
        if re.search(pattern, architecture):
            arguments |= meaning
    if not KNOWN.fullmatch(architecture):
        why = next((f" ({what})" for other, what in OTHERS.items() if re.search(other, architecture)), "")
        raise LoadError(
            f"{where}: timm's architecture {architecture!r} is none that can be read{why}; expected a "
            "Vision Transformer such as vit_base_patch16_224 or deit_tiny_distilled_patch16_224"
        )
    arguments["img_size"] = around["input_size"][1:]
    arguments["num_classes"] = content.get("num_classes", around.get("num_classes", 1000))
    if content.get("global_pool"):
        arguments["global_pool"] = content["global_pool"]
    given = {key: value for key, value in (content.get("model_args") or {}).items() if value is not None}
    for key, value in given.items():
        neutral = key in NEUTRAL and value == NEUTRAL[key]
        if key not in HONOURED | IGNORED and not neutral:
            raise LoadError(f"{where}: model_args has {key}={value!r}, which cannot be honoured here")
    if "position_resize" in content:
        arguments["position_resize"] = content["position_resize"]
    return arguments | given


def _config(
    tensors: Mapping[str, Stored],
    arguments: Mapping[str, Any],
    asked: Mapping[str, Any],
    where: str,
) -> tuple[ViTConfig, list[tuple[int, int]]]:
    """The shapes' word, unless timm's arguments say how it should be; and the sizes that fit positions."""
    width, inputs, *kernel = tensors["patch_embed.proj.weight"].shape
    roots = (f"{STEM}conv.weight", f"{STEM}stem.conv.weight")
    root = next((tensors[name] for name in roots if name in tensors), None)
    stages = numbered(tensors, rf"{re.escape(STEM)}stages\.(\d+)\.")
    units = tuple(
        numbered(tensors, rf"{re.escape(STEM)}stages\.{stage}\.blocks\.(\d+)\.") for stage in range(stages)
    )
    coarser = 4 * 2 ** max(stages - 1, 0) if root else 1
    patch = (kernel[0] * coarser, kernel[1] * coarser)
    up, down = (tensors[f"blocks.0.mlp.fc{n}.weight"].shape for n in (1, 2))
    gated = up[0] == 2 * down[1]
    class_token = arguments.get("class_token", "cls_token" in tensors)
    distilled = arguments.get("distilled", "dist_token" in tensors)
    register = tensors.get("reg_token")
    registers = arguments.get("reg_tokens", register.shape[1] if register else 0)
    special = class_token + distilled + registers
    sizes = [pair(arguments.get("img_size", asked.get("image_size", 224)))]
    positioned = None
    if "pos_embed" in tensors:
        positions = tensors["pos_embed"].shape[1]
        if "img_size" not in arguments:
            counts = [positions - prefix for prefix in _prefixes(special, distilled, asked)]
            sizes = image_sizes_of(counts, patch, asked, where)
        cells = math.prod(-(-size // side) for size, side in zip(sizes[0], patch, strict=True))
        if positions - cells != special:
            positioned = 0 if "img_size" in arguments else positions - cells
    head = tensors.get("head.weight")
    pool = arguments.get("global_pool", _pool(tensors, class_token))
    pre_norm = arguments.get("pre_norm", "norm_pre.weight" in tensors)
    activation = arguments.get("act_layer", "silu" if gated else "gelu")
    if pool not in POOLS or activation not in ACTIVATIONS:
        raise LoadError(
            f"{where}: global_pool={pool!r} with act_layer={activation!r} cannot be honoured here"
        )
    values = {
        "width": arguments.get("embed_dim", width),
        "depth": arguments.get("depth", numbered(tensors, r"blocks\.(\d+)\.")),
        "heads": arguments["num_heads"],
        "mlp_width": down[1],
        "patch": patch,
        "image_size": sizes[0],
        "position_resize": arguments.get("position_resize", "bicubic-antialias"),
        "channels": arguments.get("in_chans", root.shape[1] if root else inputs),
        "classes": arguments.get("num_classes", head.shape[0] if head else 0),
        "stem": "resnet" if root else "patch",
        "resnet_units": arguments.get("units", units),
        "pool": POOLS[pool],
        "class_token": class_token,
        "distillation_token": distilled,
        "registers": registers,
        "positions": "learned" if "pos_embed" in tensors else "none",
        "positioned_tokens": positioned,
        "mlp": "swiglu" if gated else ACTIVATIONS[activation],
        "qkv_bias": "blocks.0.attn.qkv.bias" in tensors,
        "qk_norm": "blocks.0.attn.q_norm.weight" in tensors,
        "pre_norm": pre_norm,
        "layer_scale": _layer_scale(tensors, arguments),
        "norm_eps": arguments.get("norm_eps", 1e-6),
        "norm_after_pool": "fc_norm.weight" in tensors,
        **{ours: arguments[theirs] for theirs, ours in DROPS.items() if theirs in arguments},
    }
    if distilled:  # a class of its own, which knows nothing of these
        values |= {"registers": 0, "pool": "class", "norm_after_pool": False, "positioned_tokens": None}
    config = build_config(ViTConfig, values)
    check_whole_patches(config, where)
    return config, sizes


def _prefixes(special: int, distilled: bool, asked: Mapping[str, Any]) -> tuple[int, ...]:
    """How many of the special tokens may have a position, the likeliest first: of registers few have."""
    if "positioned_tokens" in asked:
        covered = asked["positioned_tokens"]
        return (special if covered is None else covered,)
    return (special,) if distilled else (0, special)


def _assumed(config: ViTConfig, sizes: list[tuple[int, int]], asked: Mapping[str, Any]) -> tuple[str, ...]:
    """What tensors without a config.json leave open, as the caller could have said it."""
    learned, two_heads = config.positions == "learned", config.distillation_token
    undecided = {
        "heads": (config.heads, True),
        "norm_eps": (config.norm_eps, True),
        "pool": (config.pool, config.pool != "attention" and not two_heads),
        "mlp": (config.mlp, config.mlp != "swiglu"),
        "image_size": (config.image_size, True),
        "positioned_tokens": (config.positioned, learned and config.special_tokens and not two_heads),
    }
    return (
        *(f"{name}={value!r}" for name, (value, is_so) in undecided.items() if is_so and name not in asked),
        *(f"that it was not trained at image_size={size}, which fits too" for size in sizes[1:]),
        "neither rotary positions nor norms after attention, which would not show",
        "the preprocessing (mean 0.5, std 0.5, of a square the middle 90 %)",
    )


def _pool(tensors: Mapping[str, Stored], class_token: bool) -> str:
    """What tensors without a config.json were pooled by."""
    if "attn_pool.latent" in tensors:
        return "map"
    return "token" if class_token and "fc_norm.weight" not in tensors else "avg"


def _layer_scale(tensors: Mapping[str, Stored], arguments: Mapping[str, Any]) -> float | None:
    """Where it began, which only a new training would need; most architectures say 1e-5."""
    return (arguments.get("init_values") or 1e-5) if "blocks.0.ls1.gamma" in tensors else None


def _names(config: ViTConfig) -> dict[str, str]:
    table = dict(NAMES)
    if config.norm_after_pool:
        table["norm.*"] = "fc_norm.*"
    if not config.resnet_units:  # their stem has no name of its own when there is nothing after it
        table["patches.stem.root.0.*"] = f"{STEM}conv.*"
        table["patches.stem.root.1.*"] = f"{STEM}norm.*"
    return table


def write(model: Model, folder: Path) -> None:
    """What timm.create_model("local-dir:FOLDER", pretrained=True) reads."""
    config: ViTConfig = model.config
    state = model.state_dict()
    table = _names(config)
    tensors = theirs_from_ours(places(table, state, "timm"), state)
    first = "patches.stem.root.0.*" if config.stem == "resnet" else "patches.projection.*"
    kernel = list(state["patches.projection.weight"].shape[2:])
    hidden = config.mlp_width * (2 if config.mlp == "swiglu" else 1)
    activation = "silu" if config.mlp == "swiglu" else config.mlp
    pool = next((theirs for theirs, ours in POOLS.items() if ours == config.pool), "token")
    write_tensors(folder / WEIGHTS, tensors)
    write_json(
        folder / CONFIG,
        {
            "architecture": _architecture(config),
            "num_classes": config.classes,
            "num_features": config.width,
            "global_pool": pool,
            "position_resize": config.position_resize,  # nothing that timm would read
            **({"label_names": list(model.labels)} if model.labels else {}),
            "model_args": {
                "img_size": list(config.image_size),
                "patch_size": kernel,
                "in_chans": config.channels,
                "num_classes": config.classes,
                "embed_dim": config.width,
                "depth": config.depth,
                "num_heads": config.heads,
                "mlp_ratio": _ratio(hidden, config.width),
                "qkv_bias": config.qkv_bias,
                "global_pool": pool,
                "act_layer": next((t for t, ours in ACTIVATIONS.items() if ours == activation), "gelu"),
                **_options(config),
            },
            "pretrained_cfg": {
                **to_timm(model.preprocess),
                "num_classes": config.classes,
                "fixed_input_size": model.preprocess.size == config.image_size,
                "first_conv": table[first].removesuffix(".*"),
                "classifier": ["head", "head_dist"] if config.distillation_token else "head",
            },
        },
    )


def _ratio(hidden: int, width: int) -> float:
    """What times the width is hidden; timm cuts off after the point, so a half guards what is not whole."""
    return (hidden + 0.5) / width if hidden % width else hidden / width


def _architecture(config: ViTConfig) -> str:
    if config.distillation_token:
        return "deit_base_distilled_patch16_224"
    if config.stem == "resnet":
        return HYBRIDS.get(config.resnet_units, HYBRIDS[()])
    if config.mlp == "swiglu":
        return "vit_giant_patch14_dinov2"
    if config.norm_eps == CLIP_EPS:
        return CLIP
    return f"vit_{PLAIN.get(config.width, 'base')}_patch16_224"


def _options(config: ViTConfig) -> dict[str, Any]:
    """The arguments that a plain ViT leaves as they are."""
    # The architecture of the gated models comes with a layer scale.
    always = {"init_values": config.layer_scale or 0.0}
    choices = {
        "qk_norm": (config.qk_norm, False),
        "pre_norm": (config.pre_norm, _architecture(config) == CLIP),
        "class_token": (config.class_token, True),
        "reg_tokens": (config.registers, 0),
        "no_embed_class": (config.positioned_tokens == 0, False),
        "fc_norm": (config.norm_after_pool, config.pool == "mean"),
        "pos_embed": ("learn" if config.positions == "learned" else "none", "learn"),
        "pos_drop_rate": (config.dropout, 0.0),
        **{theirs: (getattr(config, ours), 0.0) for theirs, ours in DROPS.items()},
    }
    return always | {key: value for key, (value, usual) in choices.items() if value != usual}


ADAPTER = Adapter(is_one, read, write)
