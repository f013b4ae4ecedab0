"""The original .npz files, whose layout timm's own reader vouches for here."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compare import distance, disturbed, randomise, same
from judges import timm
from vitrail.weights import LoadError, LoadWarning, SaveError, convert, load

SMALL = {"embed_dim": 48, "depth": 2, "num_heads": 3, "mlp_ratio": 2.5, "num_classes": 5}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("vit_tiny_patch16_224", {**SMALL, "img_size": 32, "patch_size": 8}),
    "oblong": ("vit_tiny_patch16_224", {**SMALL, "img_size": (32, 48), "patch_size": 8}),
    "no classes": ("vit_tiny_patch16_224", {**SMALL, "img_size": 32, "num_classes": 0}),
    "hybrid, stem alone": ("vit_tiny_r_s16_p8_224", {**SMALL, "img_size": 64}),
    "hybrid, R50": ("vit_base_r50_s16_224", {**SMALL, "img_size": 32}),
}


def original(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """A timm model's weights as the original code saves them, written out from its layout."""
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    width, heads = model.embed_dim, model.blocks[0].attn.num_heads

    def filters(name: str) -> np.ndarray:
        return state[f"{name}.weight"].transpose(2, 3, 1, 0)  # height, width, in, out

    def norm(theirs: str, ours: str, last: str = "LayerNorm") -> dict[str, np.ndarray]:
        shape = (1, 1, 1, -1) if last == "GroupNorm" else (-1,)
        return {
            f"{theirs}/scale": state[f"{ours}.weight"].reshape(shape),
            f"{theirs}/bias": state[f"{ours}.bias"].reshape(shape),
        }

    def dense(theirs: str, ours: str) -> dict[str, np.ndarray]:
        return {f"{theirs}/kernel": state[f"{ours}.weight"].T, f"{theirs}/bias": state[f"{ours}.bias"]}

    arrays = {
        "cls": state["cls_token"],
        "Transformer/posembed_input/pos_embedding": state["pos_embed"],
        "embedding/kernel": filters("patch_embed.proj"),
        "embedding/bias": state["patch_embed.proj.bias"],
        **norm("Transformer/encoder_norm", "norm"),
    }
    if "head.weight" in state:
        arrays |= dense("head", "head")
    for i in range(len(model.blocks)):
        block, ours = f"Transformer/encoderblock_{i}", f"blocks.{i}"
        arrays |= norm(f"{block}/LayerNorm_0", f"{ours}.norm1")
        arrays |= norm(f"{block}/LayerNorm_2", f"{ours}.norm2")
        arrays |= dense(f"{block}/MlpBlock_3/Dense_0", f"{ours}.mlp.fc1")
        arrays |= dense(f"{block}/MlpBlock_3/Dense_1", f"{ours}.mlp.fc2")
        attention = f"{block}/MultiHeadDotProductAttention_1"
        weights = np.split(state[f"{ours}.attn.qkv.weight"], 3)
        biases = np.split(state[f"{ours}.attn.qkv.bias"], 3)
        for part, weight, bias in zip(("query", "key", "value"), weights, biases, strict=True):
            arrays[f"{attention}/{part}/kernel"] = weight.T.reshape(width, heads, -1)
            arrays[f"{attention}/{part}/bias"] = bias.reshape(heads, -1)
        arrays[f"{attention}/out/kernel"] = state[f"{ours}.attn.proj.weight"].T.reshape(heads, -1, width)
        arrays[f"{attention}/out/bias"] = state[f"{ours}.attn.proj.bias"]
    if hasattr(model.patch_embed, "backbone"):
        backbone = model.patch_embed.backbone
        stem = "patch_embed.backbone" + (".stem" if hasattr(backbone, "stem") else "")
        arrays["conv_root/kernel"] = filters(f"{stem}.conv")
        arrays |= norm("gn_root", f"{stem}.norm", "GroupNorm")
        for s, stage in enumerate(getattr(backbone, "stages", [])):
            for u, unit in enumerate(stage.blocks):
                theirs = f"block{s + 1}/unit{u + 1}"
                ours = f"patch_embed.backbone.stages.{s}.blocks.{u}"
                for n in (1, 2, 3):
                    arrays[f"{theirs}/conv{n}/kernel"] = filters(f"{ours}.conv{n}")
                    arrays |= norm(f"{theirs}/gn{n}", f"{ours}.norm{n}", "GroupNorm")
                if unit.downsample is not None:
                    arrays[f"{theirs}/conv_proj/kernel"] = filters(f"{ours}.downsample.conv")
                    arrays |= norm(f"{theirs}/gn_proj", f"{ours}.downsample.norm", "GroupNorm")
    return arrays


def small(case: str) -> torch.nn.Module:
    architecture, changes = MODELS[case]
    model = timm.create_model(architecture, **changes).eval()
    randomise(model)
    return model


def read_by_timm(case: str, file: Path) -> torch.nn.Module:
    architecture, changes = MODELS[case]
    model = timm.create_model(architecture, **changes).eval()
    model.load_pretrained(str(file))
    return model


def told(file: Path, **more: Any) -> torch.nn.Module:
    """Loaded, and what the arrays cannot tell is said."""
    with pytest.warns(LoadWarning, match=r"assumed norm_eps=1e-06; the preprocessing \(resized, mean 0.5"):
        return load(file, **more)


@pytest.mark.parametrize("case", MODELS)
def test_in_and_out_again(case: str, tmp_path: Path) -> None:
    judge = small(case)
    np.savez(tmp_path / "theirs.npz", **original(judge))
    vouched = read_by_timm(case, tmp_path / "theirs.npz").state_dict()
    assert all(same(tensor, vouched[name]) for name, tensor in judge.state_dict().items())

    size = judge.patch_embed.img_size
    ours = told(tmp_path / "theirs.npz", **({"image_size": size} if case == "oblong" else {}))
    assert (ours.config.heads, ours.config.position_resize) == (3, "bilinear-corners")
    assert ours.config.image_size == size
    assert ours.preprocess.mean == (0.5, 0.5, 0.5)
    x = torch.randn(2, 3, *size)
    with torch.no_grad():
        assert distance(ours(x), judge(x)) < 1e-5
        with disturbed(judge.blocks[1].attn.proj.weight):
            assert distance(ours(x), judge(x)) > 1e-5

    with pytest.warns(LoadWarning, match="assumed"):
        convert(tmp_path / "theirs.npz", tmp_path / "again.npz", to="npz", image_size=size)
    assert load(tmp_path / "again.npz").config == ours.config  # nothing need be assumed any more
    back = read_by_timm(case, tmp_path / "again.npz").state_dict()
    assert all(same(tensor, back[name]) for name, tensor in judge.state_dict().items())
    with np.load(tmp_path / "theirs.npz") as theirs, np.load(tmp_path / "again.npz") as again:
        assert set(again) - set(theirs) == {"vitrail_config"}
        assert set(theirs) <= set(again)
        assert all(np.array_equal(theirs[name], again[name]) for name in theirs)
        assert json.loads(bytes(again["vitrail_config"]))["config"]["heads"] == 3


def test_before_fine_tuning(tmp_path: Path) -> None:
    """Files of the 21k classes have a tanh layer before the head; checkpoints have an optimiser."""
    judge = small("plain")
    kernel, bias = np.random.default_rng(0).normal(size=(48, 48)), np.ones(48)
    arrays = {
        **original(judge),
        "pre_logits/kernel": kernel.astype("f4"),
        "pre_logits/bias": bias.astype("f4"),
    }
    training = {f"opt/target/{name}": array for name, array in arrays.items()}
    np.savez(tmp_path / "in21k.npz", **training, **{"opt/state/step": np.array(7)})
    ours = told(tmp_path / "in21k.npz")
    assert ours.config.representation == 48
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        features = judge.forward_head(judge.forward_features(x), pre_logits=True)
        before = torch.tanh(features @ torch.from_numpy(arrays["pre_logits/kernel"]) + 1)
        assert distance(ours(x), judge.head(before)) < 1e-5


def test_group_norms_without_dimensions(tmp_path: Path) -> None:
    arrays = original(small("hybrid, stem alone"))
    np.savez(tmp_path / "with.npz", **arrays)
    flat = {name: array.ravel() if array.shape[:3] == (1, 1, 1) and "gn" in name else array
            for name, array in arrays.items()}  # fmt: skip
    np.savez(tmp_path / "without.npz", **flat)
    with_, without = (told(tmp_path / f"{name}.npz").state_dict() for name in ("with", "without"))
    assert all(same(with_[name], without[name]) for name in with_)


def test_everything_travels(tmp_path: Path, tiny_folder: Any) -> None:
    folder = tiny_folder(
        labels=("ant", "bee", "cat", "dog", "eel"),
        dropout=0.1,
        position_resize="bicubic",
        image_size=(32, 48),
    )
    convert(folder, tmp_path / "out.npz", to="npz")
    ours, back = load(folder), load(tmp_path / "out.npz")
    assert (back.config, back.labels, back.preprocess) == (ours.config, ours.labels, ours.preprocess)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"registers": 1}, "register_tokens"),
        ({"distillation_token": True}, "distillation_token"),
        ({"layer_scale": 0.1}, "attention_scale.gain"),
        ({"qk_norm": True}, "query_norm"),
        ({"pool": "attention"}, "attention_pooling.query"),
        ({"pool": "mean"}, "pool='mean'"),
        ({"positions": "none"}, "positions='none'"),
        ({"qkv_bias": False}, "qkv_bias=False"),
        ({"mlp": "swiglu"}, "mlp='swiglu'"),
        ({"norm_eps": 1e-12}, "norm_eps=1e-12"),
        ({"norm_after_pool": True}, "norm_after_pool=True"),
        ({"image_size": 30}, "no multiple"),
    ],
    ids=str,
)
def test_what_the_original_cannot_say(
    changes: dict[str, Any], field: str, tmp_path: Path, tiny_folder: Any
) -> None:
    with pytest.raises(SaveError, match=field):
        convert(tiny_folder(**changes), tmp_path / "out.npz", to="npz")
    assert not (tmp_path / "out.npz").exists()


def test_a_field_that_it_cannot_say_can_be_changed(tmp_path: Path, tiny_folder: Any) -> None:
    convert(tiny_folder(norm_eps=1e-12), tmp_path / "out.npz", to="npz", norm_eps=1e-6)
    assert load(tmp_path / "out.npz").config.norm_eps == 1e-6


def test_no_bfloat16(tmp_path: Path, tiny_folder: Any) -> None:
    with pytest.raises(SaveError, match="no bfloat16"):
        convert(tiny_folder(), tmp_path / "out.npz", to="npz", dtype=torch.bfloat16)


def test_bfloat16_is_read(tmp_path: Path) -> None:
    """Some of the published files hold it, in a type that numpy does not know."""
    judge = small("plain")
    arrays = {
        name: torch.from_numpy(np.ascontiguousarray(array)).bfloat16().view(torch.int16).numpy().view("V2")
        for name, array in original(judge).items()
    }
    np.savez(tmp_path / "half.npz", **arrays)
    ours = told(tmp_path / "half.npz")
    assert ours.patches.projection.bias.dtype == torch.bfloat16
    assert same(ours.patches.projection.bias.detach(), judge.patch_embed.proj.bias.detach().bfloat16())


@pytest.mark.parametrize("harm", ["missing", "unexpected", "misshapen", "objects", "letters"])
def test_every_array_is_accounted_for(harm: str, tmp_path: Path) -> None:
    arrays = original(small("plain"))
    name = "Transformer/encoderblock_1/LayerNorm_2/bias"
    if harm == "missing":
        del arrays[name]
    else:
        odd = {
            "unexpected": np.zeros(3),
            "misshapen": np.zeros(7),
            "objects": np.array([{}]),
            "letters": np.array("a"),
        }
        arrays["surprise" if harm == "unexpected" else name] = odd[harm]
    np.savez(tmp_path / "x.npz", **arrays)
    told = {
        "missing": f"1 missing: {name}",
        "unexpected": "1 unexpected: surprise",
        "misshapen": rf"{name} \(7,\) instead of \(48,\)",
        "objects": "no intact .npz",
        "letters": "no intact .npz",
    }
    with pytest.raises(LoadError, match=told[harm]):
        load(tmp_path / "x.npz")


def test_newer_layouts_are_refused(tmp_path: Path) -> None:
    """big_vision's, which has other names and all blocks in one array."""
    np.savez(tmp_path / "x.npz", **{"params/embedding/kernel": np.zeros((8, 8, 3, 48))})
    with pytest.raises(LoadError, match="no family that can be read"):
        load(tmp_path / "x.npz")


def test_resized_as_the_original_does(tmp_path: Path) -> None:
    """Which zooms a table in linear steps from corner to corner."""
    judge = small("plain")
    np.savez(tmp_path / "x.npz", **original(judge))
    with pytest.warns(LoadWarning, match="from 4x4 to 7x7"):
        table = told(tmp_path / "x.npz", image_size=56).positions.table.detach()
    grid = judge.pos_embed[0, 1:].detach().unflatten(0, (4, 4))
    at = torch.linspace(0, 3, 7)
    low, share = at.floor().long().clamp(max=2), (at - at.floor().clamp(max=2))
    rows = grid[low] + (grid[low + 1] - grid[low]) * share[:, None, None]
    both = rows[:, low] + (rows[:, low + 1] - rows[:, low]) * share[None, :, None]
    assert distance(table[0, 1:], both.flatten(0, 1)) < 1e-5
    assert same(table[0, 0], judge.pos_embed[0, 0].detach())


def test_an_empty_file_of_arrays(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    np.savez(buffer)
    (tmp_path / "x.npz").write_bytes(buffer.getvalue())
    with pytest.raises(LoadError):
        load(tmp_path / "x.npz")
