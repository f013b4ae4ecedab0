"""Models of timm, saved by timm: read, and written so that timm reads them."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from compare import distance, disturbed, randomise, same
from judges import timm
from vitrail.weights import LoadError, LoadWarning, SaveError, convert, load
from vitrail.weights.checkpoint import Checkpoint
from vitrail.weights.files import Stored
from vitrail.weights.loading import draft_of, tensors_of
from vitrail.weights.timm import KNOWN

SMALL = {"embed_dim": 48, "depth": 2, "num_heads": 3, "mlp_ratio": 2.5, "num_classes": 5}
ODD = {**SMALL, "img_size": (32, 48), "patch_size": 8}
REGISTERS = {"reg_tokens": 2, "class_token": False}
# What it shows → an architecture of timm's, and what makes it small and odd.
MODELS = {
    "plain": ("vit_tiny_patch16_224", ODD),
    "patch 7": ("vit_small_patch16_224", {**SMALL, "img_size": (21, 35), "patch_size": 7}),
    "no qkv bias, qk norm": ("vit_tiny_patch16_224", {**ODD, "qkv_bias": False, "qk_norm": True}),
    "one channel": ("vit_tiny_patch16_224", {**ODD, "in_chans": 1}),
    "one channel, hybrid": ("vit_tiny_r_s16_p8_224", {**SMALL, "img_size": 64, "in_chans": 1}),
    "no classes": ("vit_tiny_patch16_224", {**ODD, "num_classes": 0}),
    "no positions": ("vit_tiny_patch16_224", {**ODD, "pos_embed": "none"}),
    "GELU by tanh": ("vit_tiny_patch16_224", {**ODD, "act_layer": "gelu_tanh"}),
    "quick GELU": ("vit_tiny_patch16_224", {**ODD, "act_layer": "quick_gelu"}),
    "mean, then norm": ("vit_tiny_patch16_224", {**ODD, "global_pool": "avg"}),
    "norm, then class": ("vit_tiny_patch16_224", {**ODD, "fc_norm": True}),
    "mean, no class token": ("vit_medium_patch16_gap_256", ODD),
    "registers with positions": ("vit_so150m_patch16_reg4_gap_256", {**ODD, **REGISTERS}),
    "registers without": ("vit_medium_patch16_reg4_gap_256", ODD),
    "attention pooling": ("vit_base_patch16_siglip_224", ODD),
    "attention pooling, registers": ("vit_so150m_patch16_reg4_map_256", ODD),
    "attention pooling, no qkv bias": ("vit_base_patch16_siglip_224", {**ODD, "qkv_bias": False}),
    "CLIP": ("vit_base_patch16_clip_224", ODD),
    "CLIP, quick GELU": ("vit_base_patch32_clip_quickgelu_224", ODD),
    "CLIP, norm as usual": ("vit_base_patch16_clip_224", {**ODD, "pre_norm": False}),
    "layer scale": ("vit_tiny_patch16_224", {**ODD, "init_values": 0.1}),
    "DINOv2": ("vit_small_patch14_dinov2", {**SMALL, "img_size": 42, "num_classes": 0}),
    "DINOv2, registers": ("vit_small_patch14_reg4_dinov2", {**SMALL, "img_size": (28, 42)}),
    "DINOv2, gated": ("vit_giant_patch14_dinov2", {**SMALL, "img_size": 28, "mlp_ratio": 5.34}),
    "DeiT, two heads": ("deit_tiny_distilled_patch16_224", ODD),
    "DeiT, no heads": ("deit_tiny_distilled_patch16_224", {**ODD, "num_classes": 0}),
    "DeiT III": ("deit3_small_patch16_224", ODD),
    "hybrid, stem alone": ("vit_tiny_r_s16_p8_224", {**SMALL, "img_size": 64}),
    "hybrid, R26": ("vit_small_r26_s32_224", {**SMALL, "img_size": (64, 32)}),
}


def small(case: str) -> torch.nn.Module:
    architecture, changes = MODELS[case]
    model = timm.create_model(architecture, **changes).eval()
    randomise(model)
    return model if "hybrid" in case else model.double()


def images(model: torch.nn.Module, batch: int = 2) -> torch.Tensor:
    size = model.patch_embed.img_size
    return torch.randn(batch, model.in_chans, *size, dtype=next(model.parameters()).dtype)


def saved(model: torch.nn.Module, folder: Path, **more: object) -> Path:
    timm.models.save_for_hf(model, folder, safe_serialization=True, **more)
    return folder


@pytest.mark.parametrize("case", MODELS)
def test_in_and_out_again(case: str, tmp_path: Path) -> None:
    judge = small(case)
    source = saved(judge, tmp_path / "theirs")
    ours = load(source)
    x = images(judge)
    with torch.no_grad():
        answer = judge(x)
        assert distance(ours(x), answer) < 1e-5
        with disturbed(judge.blocks[1].mlp.fc1.weight):
            assert distance(ours(x), judge(x)) > 1e-5

        convert(source, tmp_path / "again", to="timm")
        again = timm.create_model(f"local-dir:{tmp_path / 'again'}", pretrained=True)
        assert same(again.to(x).eval()(x), answer)


@pytest.mark.parametrize("wrapper", [None, "model", "state_dict", "state_dict_ema"])
def test_a_state_dict_alone(wrapper: str | None, tmp_path: Path) -> None:
    judge = small("mean, then norm")
    state = {f"module.{name}": tensor for name, tensor in judge.state_dict().items()}
    content = state if wrapper is None else {wrapper: state, "epoch": 3}
    torch.save(content, tmp_path / "checkpoint.pth")
    with pytest.warns(LoadWarning, match="preprocessing"):
        ours = load(tmp_path / "checkpoint.pth", heads=3, image_size=(32, 48))
    x = images(judge)
    with torch.no_grad():
        assert distance(ours(x), judge(x)) < 1e-5


def test_what_a_state_dict_does_not_tell_must_be_said(tmp_path: Path) -> None:
    judge = timm.create_model("vit_tiny_patch16_224", **{**ODD, "img_size": (32, 40)})
    save_file(judge.state_dict(), tmp_path / "weights.safetensors")
    with pytest.raises(LoadError, match="heads=…"):
        load(tmp_path / "weights.safetensors")
    with pytest.raises(LoadError, match=r"21 or 20 patches of 8x8.*image_size=\(height, width\)"):
        load(tmp_path / "weights.safetensors", heads=3)


def alone(model: torch.nn.Module, folder: Path) -> Path:
    save_file(model.state_dict(), folder / "weights.safetensors")
    return folder / "weights.safetensors"


def test_what_is_guessed_is_said(tmp_path: Path) -> None:
    model = timm.create_model("deit3_small_patch16_224", embed_dim=128, num_heads=2, depth=1, img_size=32)
    with pytest.warns(LoadWarning) as said:
        config = load(alone(model, tmp_path)).config
    assert (config.heads, config.positioned_tokens, config.image_size) == (2, 0, (32, 32))
    for guess in (
        "heads=2",
        "pool='class'",
        "mlp='gelu'",
        "image_size=(32, 32)",
        "positioned_tokens=0",
        "neither rotary positions nor norms after attention",
        "the preprocessing",
    ):
        assert guess in str(said[0].message)


# What it shows → arguments of timm's, what load is told of it, what is said to be assumed, and what is not.
ALONE: dict[str, tuple[dict[str, object], dict[str, object], str, str]] = {
    "mean after the norm": (
        {"global_pool": "avg", "fc_norm": False},
        {"pool": "mean"},
        "mlp='gelu'",
        "pool=",
    ),
    "class before the norm": (
        {"fc_norm": True},
        {"pool": "class", "mlp": "gelu"},
        "image_size=(28, 28); positioned_tokens=1",
        "pool=|mlp=",
    ),
    "as usual": ({}, {}, "pool='class'", "fits too"),
    "as usual, mean": ({"global_pool": "avg"}, {}, "pool='mean'", "fits too"),
    "attention pooling": (
        {"global_pool": "map", "class_token": False},
        {},
        "mlp=",
        "pool=|positioned_tokens=",
    ),
    "3x3 without special tokens": (
        {"reg_tokens": 4, "no_embed_class": True, "img_size": 21},
        {},
        "image_size=(21, 21); positioned_tokens=0; that it was not trained at image_size=(14, 14)",
        "distil",
    ),
    "2x2 and special tokens": (
        {"reg_tokens": 4, "img_size": 14},
        {"positioned_tokens": 5},
        "image_size=(14, 14)",
        "positioned_tokens=|fits too",
    ),
    "2x2, by the size": (
        {"reg_tokens": 4, "img_size": 14},
        {"image_size": 14},
        "positioned_tokens=5; that it was not trained at image_size=(21, 21), which fits too",
        "image_size=.14, 14",
    ),
    "fewer positions than special tokens": (
        {"reg_tokens": 4, "no_embed_class": True, "img_size": 14},
        {},
        "image_size=(14, 14); positioned_tokens=0",
        "fits too",
    ),
    "a square's number of patches": (
        {"img_size": (14, 56)},
        {"image_size": (14, 56)},
        "that it was not trained at image_size=(28, 28), which fits too",
        "image_size=.14, 56",
    ),
    "no positions": ({"pos_embed": "none"}, {}, "image_size=(224, 224)", "positioned_tokens="),
}


@pytest.mark.parametrize("case", ALONE)
def test_what_tensors_leave_open(case: str, tmp_path: Path) -> None:
    arguments, told, guess, silence = ALONE[case]
    odd = {**SMALL, "img_size": 28, "patch_size": 7, **arguments}
    judge = timm.create_model("vit_small_patch16_224", **odd).eval()
    randomise(judge)
    with pytest.warns(LoadWarning) as said:
        ours = load(alone(judge, tmp_path), heads=3, **told)
    (message,) = (str(warning.message) for warning in said)
    assert guess in message
    assert not re.search(silence, message)
    x = images(judge)
    with torch.no_grad():
        assert distance(ours.double()(x.double()), judge.double()(x.double())) < 1e-5


def test_another_guess_gives_another_answer(tmp_path: Path) -> None:
    judge = timm.create_model("vit_tiny_patch16_224", **ODD, fc_norm=True).eval()
    randomise(judge)
    x = images(judge)
    with pytest.warns(LoadWarning, match="pool='mean'"):
        ours = load(alone(judge, tmp_path), heads=3, image_size=(32, 48))
    with torch.no_grad():
        assert distance(ours(x), judge(x)) > 1e-3


def test_no_positions_that_could_be(tmp_path: Path) -> None:
    judge = timm.create_model("vit_tiny_patch16_224", **{**ODD, "reg_tokens": 4})
    with pytest.raises(LoadError, match="positions for 29 or 24 patches of 8x8, which form no square"):
        load(alone(judge, tmp_path), heads=3)
    with pytest.raises(LoadError, match="positions for 24 patches of 8x8"):
        load(alone(judge, tmp_path), heads=3, positioned_tokens=None)


def test_resized_as_timm_does(tmp_path: Path) -> None:
    judge = small("plain")
    source = saved(judge, tmp_path)
    judge.set_input_size((48, 40))
    x = images(judge)
    with pytest.warns(LoadWarning, match="resized from 4x6 to 6x5"):
        ours = load(source, image_size=(48, 40))
    assert ours.preprocess.size == (48, 40)
    with torch.no_grad():
        assert distance(ours(x), judge(x)) < 1e-5


def test_labels_and_preprocessing_travel(tmp_path: Path) -> None:
    labels = ["ant", "bee", "cat", "dog", "eel"]
    source = saved(small("plain"), tmp_path / "theirs", model_config={"label_names": labels})
    assert load(source).labels == tuple(labels)
    convert(source, tmp_path / "again", to="timm")
    content = json.loads((tmp_path / "again" / "config.json").read_text())
    assert content["label_names"] == labels
    theirs = timm.create_model(f"local-dir:{tmp_path / 'again'}")
    config = timm.data.resolve_data_config({}, model=theirs)
    assert list(config["mean"]) == [0.5, 0.5, 0.5]
    assert tuple(config["input_size"]) == (3, 32, 48)


# One architecture for each thing that a name can mean.
NAMES = [
    "vit_tiny_patch16_224",
    "vit_small_patch16_36x1_224",
    "vit_medium_patch16_gap_240",
    "flexivit_base",
    "vit_mediumd_patch16_reg4_gap_256",
    "vit_betwixt_patch16_reg1_gap_256",
    "vit_base_patch16_gap_224",
    "vit_base_patch16_plus_240",
    "vit_base_patch32_siglip_256",
    "vit_so150m_patch16_reg4_map_256",
    "vit_so150m2_patch16_reg1_gap_256",
    "vit_large_patch16_siglip_gap_512",
    "eva_large_patch14_196",
    "vit_so400m_patch16_siglip_256",
    "vit_huge_patch14_224",
    "vit_giant_patch14_224",
    "vit_giant_patch14_reg4_dinov2",
    "vit_giantopt_patch16_siglip_256",
    "vit_gigantic_patch14_224",
    "vit_wee_patch16_reg1_gap_256",
    "vit_little_patch16_reg4_gap_256",
    "deit3_huge_patch14_224",
    "deit_small_distilled_patch16_224",
    "vit_tiny_r_s16_p8_384",
    "vit_base_r26_s32_224",
    "vit_large_r50_s32_224",
    "vit_base_r50_s16_224",
    "vit_xsmall_patch16_clip_224",
    "vit_medium_patch32_clip_224",
    "vit_large_patch14_clip_quickgelu_336",
]
ACTIVATIONS = {"gelu": "GELU", "gelu-tanh": "GELUTanh", "gelu-quick": "QuickGELU", "swiglu": "SiLU"}
POOLS = {"class": "token", "mean": "avg", "attention": "map"}


def without_memory(architecture: str, folder: Path) -> tuple[torch.nn.Module, Checkpoint]:
    """A model of full size and what timm would save of it, on the meta device."""
    with torch.device("meta"):
        judge = timm.create_model(architecture)
    file = folder / "config.json"
    timm.models._hub.save_config_for_hf(judge, file)
    tensors = {n: Stored(t.shape, t.dtype, t.detach) for n, t in judge.state_dict().items()}
    return judge, Checkpoint(architecture, file, tensors, config=json.loads(file.read_text()))


@pytest.mark.parametrize("architecture", NAMES)
def test_a_name_means_what_timm_means(architecture: str, tmp_path: Path) -> None:
    judge, checkpoint = without_memory(architecture, tmp_path)
    draft = draft_of(checkpoint, {})
    assert len(tensors_of(draft, architecture)) > 100
    block, config = judge.blocks[0], draft.config
    assert (config.width, config.depth, config.heads, config.norm_eps) == (
        judge.embed_dim,
        len(judge.blocks),
        block.attn.num_heads,
        block.norm1.eps,
    )
    assert ACTIVATIONS[config.mlp] == type(block.mlp.act).__name__
    assert (POOLS[config.pool], config.class_token) == (judge.global_pool, judge.has_class_token)
    assert (config.registers, config.image_size) == (judge.num_reg_tokens, judge.patch_embed.img_size)


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("aimv2_large_patch14_224", "none that can be read"),
        ("swin_tiny_patch4_window7_224", "none that can be read"),
        ("resnet18", "none that can be read"),
        ("vit_base_patch16_radio_v3", "none that can be read; expected"),
        ("vit_base_patch16_rpn_224", "norms after attention and MLP, not before"),
        ("vit_base_patch16_rope_224", "rotary positions"),
        ("vit_base_patch16_rope_ape_224", "rotary positions"),
        ("vit_mediumd_patch16_rope_reg1_gap_256", "rotary positions"),
        ("vit_base_patch16_dinov3", "rotary positions"),
        ("vit_srelpos_small_patch16_224", "relative positions"),
        ("vit_small_patch16_18x2_224", "computed side by side"),
        ("vit_base_patch16_xp_224", "computed side by side"),
        ("vit_dwee_patch16_reg1_gap_256", "differential attention"),
        ("vit_base_mci_224", "another stem"),
        ("vit_small_resnet26d_224", "another stem"),
        ("vit_so400m_patch14_siglip_384", r"\(384, 384\) is no multiple of patch=\(14, 14\)"),
    ],
)
def test_other_architectures_are_refused(architecture: str, reason: str, tmp_path: Path) -> None:
    _, checkpoint = without_memory(architecture, tmp_path)
    with pytest.raises(LoadError, match=reason):
        tensors_of(draft_of(checkpoint, {}), architecture)


# All of the kind but those whose stem is a network of its own, which are slow; a few of them are above.
KIN = [
    name
    for name in timm.list_models(["vit_*", "test_vit*", "deit*", "flexivit*", "eva*", "beit3*"])
    if not re.search(r"_r\d*_s\d|_resnet|_mci_", name)
]
FREE_OF_DEPTH = {"num_kv_heads": 3}  # which one family gives as many of as it has layers


def shrunk(architecture: str) -> torch.nn.Module:
    """One block of an architecture, narrow, for pictures of two by three patches."""
    patch = re.search(r"_patch(\d+)", architecture)
    side = int(patch[1]) if patch else 16
    small = {**SMALL, "depth": 1, "img_size": (2 * side, 3 * side)}
    more = FREE_OF_DEPTH if "sapiens2" in architecture else {}
    return timm.create_model(architecture, **small, **more).eval()


@pytest.mark.parametrize("architecture", KIN)
def test_every_architecture_is_the_same_or_refused(architecture: str, tmp_path: Path) -> None:
    judge = shrunk(architecture)
    randomise(judge)
    x = images(judge)
    if not KNOWN.fullmatch(architecture):
        with pytest.raises(LoadError, match="none that can be read"):
            load(saved(judge, tmp_path))
        return
    ours = load(saved(judge, tmp_path))
    with torch.no_grad():
        assert distance(ours(x), judge(x)) < 1e-4


def test_most_of_them_are_read() -> None:
    assert sum(bool(KNOWN.fullmatch(name)) for name in KIN) >= 142


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"global_pool": "max"}, "global_pool='max'"),
        ({"act_layer": "mish"}, "act_layer='mish'"),
        ({"pre_norm": True}, "missing: norm_pre.weight"),
        ({"drop_rate": 0.5}, "drop_rate=0.5"),
        ({"something_new": 1}, "something_new=1"),
        ({"depth": 3}, "missing: blocks.2.norm1.weight"),
        ({"num_classes": 7}, r"head.weight \(5, 48\) instead of \(7, 48\)"),
        ({"embed_dim": 3 * 10**8}, "of another shape"),
        ({"depth": 10**9}, "depth=1000000000"),
        ({"num_heads": 0}, "at least 1"),
        ({"num_heads": "3"}, "heads='3'"),
    ],
)
def test_arguments_that_cannot_be_honoured(arguments: dict[str, object], reason: str, tmp_path: Path) -> None:
    saved(small("plain"), tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    content["model_args"] |= arguments
    content.pop("global_pool")
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(LoadError, match=reason):
        load(tmp_path)


def test_the_config_of_older_versions(tmp_path: Path) -> None:
    """The hub's files from before 2023: one level, and no arguments."""
    judge = timm.create_model("vit_tiny_patch16_224")
    timm.models.save_for_hf(judge, tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    flat = {"architecture": "vit_tiny_patch16_224", "num_features": 192, **content["pretrained_cfg"]}
    (tmp_path / "config.json").write_text(json.dumps(flat))
    ours = load(tmp_path)
    assert (ours.config.heads, ours.config.classes) == (3, 1000)
    assert ours.preprocess.resize == 248


def test_no_arguments_are_null(tmp_path: Path) -> None:
    judge = timm.create_model("vit_tiny_patch16_224")
    timm.models.save_for_hf(judge, tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**content, "model_args": None}))
    assert load(tmp_path).config.heads == 3


def test_labels_of_a_head_that_was_cut_off(tmp_path: Path) -> None:
    folder = saved(small("no classes"), tmp_path, model_config={"label_names": ["ant", "bee"]})
    assert load(folder).labels == ()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"pool": "class+mean"}, "pool='class\\+mean'"),
        ({"positions": "sincos"}, "positions='sincos'"),
        ({"norm_eps": 1e-12}, "norm_eps=1e-12"),
        ({"registers": 2, "positioned_tokens": 1}, "positioned_tokens=1"),
        ({"representation": 9}, "representation.weight"),
        ({"stem": "conv"}, "patches.stem.0.weight"),
        ({"image_size": (30, 32)}, r"image_size=\(30, 32\)"),
        ({"distillation_token": True, "registers": 1}, "registers=1"),
    ],
)
def test_what_timm_cannot_say(
    changes: dict[str, object], field: str, tmp_path: Path, tiny_folder: Path
) -> None:
    with pytest.raises(SaveError, match=field):
        convert(tiny_folder(**changes), tmp_path / "out", to="timm")
    assert not (tmp_path / "out").exists()
