"""Models of transformers, saved by transformers: read, and written so that transformers reads them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compare import distance, disturbed, randomise, same
from judges import transformers
from vitrail.weights import LoadError, LoadWarning, SaveError, convert, load
from vitrail.weights.errors import SHOWN

SMALL: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "image_size": [32, 48],
    "patch_size": 8,
}
VIT = {**SMALL, "intermediate_size": 100}
DINO = {**SMALL, "image_size": 32}  # transformers runs these on squares only
# What it shows → a class of transformers', and what makes its config small and odd.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "ViT": ("ViTForImageClassification", {**VIT, "num_labels": 5}),
    "ViT, two classes": ("ViTForImageClassification", VIT),
    "ViT, no classes": ("ViTForImageClassification", {**VIT, "num_labels": 0}),
    "ViT, square": ("ViTForImageClassification", {**VIT, "image_size": 21, "patch_size": 7}),
    "ViT, oblong patches": ("ViTForImageClassification", {**VIT, "patch_size": [8, 4]}),
    "ViT, no qkv bias": ("ViTForImageClassification", {**VIT, "qkv_bias": False}),
    "ViT, GELU by tanh": ("ViTForImageClassification", {**VIT, "hidden_act": "gelu_new"}),
    "ViT, quick GELU": ("ViTForImageClassification", {**VIT, "hidden_act": "quick_gelu"}),
    "ViT, one channel": ("ViTForImageClassification", {**VIT, "num_channels": 1}),
    "ViT, large eps": ("ViTForImageClassification", {**VIT, "layer_norm_eps": 0.1}),
    "ViT, pooler": ("ViTModel", VIT),
    "ViT, narrow pooler": ("ViTModel", {**VIT, "pooler_output_size": 9}),
    "DeiT, two heads": ("DeiTForImageClassificationWithTeacher", {**VIT, "num_labels": 5}),
    "DeiT, one head": ("DeiTForImageClassification", {**VIT, "num_labels": 5}),
    "DeiT, pooler": ("DeiTModel", VIT),
    "DINOv2": ("Dinov2Model", DINO),
    "DINOv2, classes": ("Dinov2ForImageClassification", {**DINO, "num_labels": 5, "mlp_ratio": 2}),
    "DINOv2, features": ("Dinov2ForImageClassification", {**DINO, "num_labels": 0}),
    "DINOv2, gated": ("Dinov2Model", {**DINO, "use_swiglu_ffn": True}),
    "DINOv2, layer scale": ("Dinov2Model", {**DINO, "layerscale_value": 0.1}),
    "registers": ("Dinov2WithRegistersModel", {**DINO, "num_register_tokens": 3}),
    "registers, classes": ("Dinov2WithRegistersForImageClassification", {**DINO, "num_labels": 5}),
    "registers, gated": ("Dinov2WithRegistersModel", {**DINO, "use_swiglu_ffn": True}),
}


def small(case: str, **more: Any) -> torch.nn.Module:
    name, changes = MODELS[case]
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**changes), **more).eval().double()
    randomise(model)
    return model


def saved(judge: torch.nn.Module, folder: Path, **how: Any) -> Path:
    """By its own means, with a preprocessor_config.json as published models have."""
    judge.save_pretrained(folder, **how)
    transformers.ViTImageProcessor().save_pretrained(folder)
    return folder


def images(judge: torch.nn.Module, size: tuple[int, int] | None = None) -> torch.Tensor:
    given = judge.config.image_size
    height, width = size or ((given, given) if isinstance(given, int) else given)
    return torch.randn(2, judge.config.num_channels, height, width, dtype=torch.double)


def answer(judge: torch.nn.Module, x: torch.Tensor, **more: Any) -> torch.Tensor:
    """Logits, or what the model without a head has for the whole picture."""
    with torch.no_grad():
        out = judge(x, **more)
    if "logits" in out:
        return out.logits
    return out.last_hidden_state[:, 0] if out.pooler_output is None else out.pooler_output


def read_back(folder: Path, judge: torch.nn.Module) -> torch.nn.Module:
    """By the class that config.json names, with nothing missing and nothing left over."""
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    assert name == type(judge).__name__
    model, report = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()


@pytest.mark.parametrize("case", MODELS)
def test_in_and_out_again(case: str, tmp_path: Path) -> None:
    judge = small(case)
    saved(judge, tmp_path / "theirs")
    ours = load(tmp_path / "theirs")
    x = images(judge)
    with torch.no_grad():
        assert distance(ours(x), answer(judge, x)) < 1e-5
        with disturbed(next(p for n, p in judge.named_parameters() if n.endswith("v_proj.weight"))):
            assert distance(ours(x), answer(judge, x)) > 1e-5

    convert(tmp_path / "theirs", tmp_path / "again", to="transformers")
    again = read_back(tmp_path / "again", judge)
    # Tensors in a file lie elsewhere in memory, and then the last bit of a product can differ.
    assert distance(answer(again, x), answer(judge, x)) < 1e-12
    states = again.state_dict(), judge.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(same(states[0][n], states[1][n]) for n in states[0] if "mask_token" not in n)


@pytest.mark.parametrize("case", ["ViT, pooler", "DeiT, pooler"])
def test_without_the_pooler(case: str, tmp_path: Path) -> None:
    judge = small(case, add_pooling_layer=False)
    saved(judge, tmp_path)
    ours, x = load(tmp_path), images(judge)
    assert ours.config.representation == 0
    with torch.no_grad():
        assert distance(ours(x), answer(judge, x)) < 1e-5


@pytest.mark.parametrize("case", ["ViT", "DeiT, two heads", "DINOv2, gated", "registers, classes"])
def test_the_names_of_version_5(case: str, tmp_path: Path) -> None:
    judge = small(case)
    saved(judge, tmp_path / "new", save_original_format=False)
    saved(judge, tmp_path / "old")
    names = [load_file(tmp_path / age / "model.safetensors").keys() for age in ("new", "old")]
    assert names[0] != names[1]
    new, old = load(tmp_path / "new").state_dict(), load(tmp_path / "old").state_dict()
    assert all(same(new[name], old[name]) for name in old)


def test_in_pieces(tmp_path: Path) -> None:
    judge = small("ViT")
    saved(judge, tmp_path, max_shard_size="100KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    x = images(judge)
    with torch.no_grad():
        assert distance(load(tmp_path)(x), answer(judge, x)) < 1e-5
    shards[1].unlink()
    with pytest.raises(LoadError, match=f"names {shards[1].name}, which is not there"):
        load(tmp_path)


def test_as_a_pickle(tmp_path: Path) -> None:
    judge = small("ViT")
    saved(judge, tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(state, tmp_path / "pytorch_model.bin")
    x = images(judge)
    with torch.no_grad():
        assert distance(load(tmp_path)(x), answer(judge, x)) < 1e-5


@pytest.mark.parametrize(
    ("case", "size"),
    [("ViT, square", (35, 14)), ("DINOv2", (40, 32)), ("registers", (40, 32))],
)
def test_resized_as_transformers_does(case: str, size: tuple[int, int], tmp_path: Path) -> None:
    judge = small(case)
    if case != "ViT, square":  # resized in float32 whatever the model is in
        judge = judge.float()
    saved(judge, tmp_path)
    with pytest.warns(LoadWarning, match="learned positions were resized"):
        ours = load(tmp_path, image_size=size)
    x = images(judge, size).to(next(judge.parameters()))
    more = {"interpolate_pos_encoding": True} if case == "ViT, square" else {}
    with torch.no_grad():
        assert distance(ours(x), answer(judge, x, **more)) < 1e-5


def test_labels_and_preprocessing_travel(tmp_path: Path) -> None:
    name, changes = MODELS["ViT"]
    labels = {0: "ant", 1: "bee", 2: "crane", 3: "crane", 4: "eel"}  # ImageNet has two cranes
    config = transformers.ViTConfig(**{**changes, "image_size": 32}, id2label=labels)
    getattr(transformers, name)(config).save_pretrained(tmp_path / "theirs")
    processor = transformers.ViTImageProcessor(size={"height": 32, "width": 32}, image_mean=[0.4] * 3)
    processor.save_pretrained(tmp_path / "theirs")
    ours = load(tmp_path / "theirs")
    assert ours.labels == tuple(labels.values())
    assert ours.preprocess.mean == pytest.approx((0.4,) * 3)

    convert(tmp_path / "theirs", tmp_path / "again", to="transformers")
    again = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "again")
    assert again.config.id2label == labels
    kept = transformers.AutoImageProcessor.from_pretrained(tmp_path / "again")
    picture = torch.randint(0, 256, (3, 50, 40), dtype=torch.uint8)
    pixels = [p(picture, return_tensors="pt")["pixel_values"] for p in (processor, kept)]
    assert same(*pixels)


def changed(case: str, folder: Path, **fields: Any) -> Path:
    saved(small(case), folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return folder


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model_type": "swin"}, "model type 'swin'; expected one of vit, deit"),
        ({"model_type": ["vit"]}, "makes no sense"),
        ({"hidden_act": "mish"}, "hidden_act='mish'"),
        ({"pooler_act": "relu"}, "pooler_act='relu'"),
        ({"architectures": ["ViTForMaskedImageModeling"]}, "ViTForMaskedImageModeling"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_hidden_layers": 3}, "16 missing: vit.encoder.layer.2.layernorm_before.weight"),
        ({"num_hidden_layers": 1}, "16 unexpected: vit.encoder.layer.1"),
        ({"num_hidden_layers": 10**9}, "depth=1000000000"),
        ({"hidden_size": 3 * 10**8}, "of another shape"),
        ({"hidden_size": 3 * 10**18}, "no model can be built"),
        ({"hidden_size": -48}, "cannot|can be built|another shape"),
        ({"intermediate_size": 101}, r"dense.weight \(100, 48\) instead of \(101, 48\)"),
        ({"num_attention_heads": 0}, "at least 1"),
        ({"num_attention_heads": 7}, "7 heads"),
        ({"image_size": 33}, "no multiple of patch"),
        ({"image_size": [32, 48, 3]}, "makes no sense"),
        ({"image_size": {"height": 32}}, "makes no sense"),
        ({"patch_size": 0}, "makes no sense"),
        ({"id2label": {"0": "a", "2": "b"}}, "lacks 1"),
        ({"id2label": 5}, "makes no sense"),
        ({"id2label": {"0": "a"}}, "classifier.weight"),
        ({"layer_norm_eps": None}, "norm_eps=None"),
        ({"dtype": "float32"}, ""),
        ({"architectures": None}, ""),
        ({"id2label": None, "num_labels": 5}, ""),
        ({"id2label": None}, r"classifier.weight \(5, 48\) instead of \(2, 48\)"),
    ],
    ids=str,
)
def test_configs_that_cannot_be_honoured(fields: dict[str, Any], reason: str, tmp_path: Path) -> None:
    folder = changed("ViT", tmp_path, **fields)
    if not reason:
        load(folder)
        return
    with pytest.raises(LoadError, match=reason):
        load(folder)


@pytest.mark.parametrize("case", ["ViT", "DeiT, two heads", "DINOv2", "registers, classes"])
@pytest.mark.parametrize("harm", ["missing", "unexpected", "misshapen", "integers"])
def test_every_tensor_is_accounted_for(case: str, harm: str, tmp_path: Path) -> None:
    saved(small(case), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("layer.1.attention.output.dense.bias"))
    if harm == "missing":
        del tensors[name]
    elif harm == "unexpected":
        tensors["vit.surprise"] = torch.zeros(3)
    elif harm == "misshapen":
        tensors[name] = torch.zeros(47)
    else:
        tensors[name] = torch.zeros(48, dtype=torch.int64)
    save_file(tensors, file)
    told = {
        "missing": f"1 missing: {name}",
        "unexpected": "1 unexpected: vit.surprise",
        "misshapen": rf"1 of another shape: {name} \(47,\) instead of \(48,\)",
        "integers": f"{name} holds torch.int64",
    }
    with pytest.raises(LoadError, match=told[harm]):
        load(tmp_path)


def test_long_lists_are_cut(tmp_path: Path) -> None:
    folder = changed("ViT", tmp_path, num_hidden_layers=6)
    with pytest.raises(LoadError, match=rf"64 missing: .* and {64 - SHOWN} more"):
        load(folder)


def test_weights_without_their_config(tmp_path: Path) -> None:
    saved(small("ViT"), tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(LoadError, match=r"no config.json beside them.*give the whole folder"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"pool": "mean"}, "pool='mean'"),
        ({"registers": 2}, "registers=2"),
        ({"qk_norm": True}, "blocks.0.attention.query_norm.weight"),
        ({"class_token": False, "pool": "mean"}, "class_token=False"),
        ({"norm_after_pool": True}, "norm_after_pool=True"),
        ({"drop_path": 0.1}, "drop_path=0.1"),
        ({"layer_scale": 1e-5}, "pool='class'"),
        ({"layer_scale": 1e-5, "classes": 0, "mlp_width": 100}, "mlp_width=100"),
        ({"positions": "none"}, "positions='none'"),
        ({"image_size": (30, 32)}, r"image_size=\(30, 32\)"),
        ({"layer_scale": 0.1, "classes": 0, "image_size": (32, 48)}, r"image_size=\[32, 48\]"),
        ({"mlp": "swiglu"}, "mlp='swiglu'"),
        ({"stem": "resnet", "resnet_units": (1,), "patch": 16}, "patches.stem.root.0.weight"),
    ],
    ids=str,
)
def test_what_transformers_cannot_say(
    changes: dict[str, Any], field: str, tmp_path: Path, tiny_folder: Any
) -> None:
    with pytest.raises(SaveError, match=field):
        convert(tiny_folder(**changes), tmp_path / "out", to="transformers")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("case", ["ViT", "DeiT, two heads", "DINOv2"])
def test_without_its_preprocessing(case: str, tmp_path: Path) -> None:
    """Then it is that of the family's image processor, as its own library makes it."""
    judge = small(case)
    judge.save_pretrained(tmp_path)
    with pytest.warns(LoadWarning, match="assumed the preprocessing .no preprocessor_config.json") as told:
        ours = load(tmp_path)
    assert len(told) == 1
    name = {"vit": "ViT", "deit": "DeiT", "dinov2": "Bit"}[judge.config.model_type]
    usual = getattr(transformers, f"{name}ImageProcessor")()
    assert (ours.preprocess.mean, ours.preprocess.std) == (tuple(usual.image_mean), tuple(usual.image_std))
    assert ours.preprocess.interpolation == {2: "bilinear", 3: "bicubic"}[int(usual.resample)]
    assert ours.preprocess.size == ours.config.image_size


def test_a_pooler_beside_a_classifier(tmp_path: Path) -> None:
    """Older files have one, which their own classifier leaves unread too."""
    judge = small("ViT")
    saved(judge, tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state |= {"vit.pooler.dense.weight": torch.ones(48, 48), "vit.pooler.dense.bias": torch.ones(48)}
    save_file(state, tmp_path / "model.safetensors")
    with pytest.warns(LoadWarning, match="vit.pooler.dense.weight, vit.pooler.dense.bias were left out"):
        ours = load(tmp_path)
    x = images(judge)
    with torch.no_grad():
        assert distance(ours(x), judge(x).logits) < 1e-5
    save_file(state | {"vit.pooler.dense.gain": torch.ones(48)}, tmp_path / "model.safetensors")
    with pytest.raises(LoadError, match=r"1 unexpected: vit.pooler.dense.gain"):
        load(tmp_path)
