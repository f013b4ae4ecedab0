"""State dicts of torchvision's VisionTransformer: read, and written so that it loads them strictly."""

import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from compare import distance, disturbed, randomise, same
from judges import torchvision
from vitrail.data.preprocess import IMAGENET_MEAN
from vitrail.weights import LoadError, LoadWarning, SaveError, convert, load

SIZES = {
    "image_size": 32,
    "patch_size": 8,
    "num_layers": 2,
    "num_heads": 3,
    "hidden_dim": 48,
    "mlp_dim": 100,
    "num_classes": 5,
}


def small(**changes: Any) -> torch.nn.Module:
    model = torchvision.models.VisionTransformer(**SIZES | changes).eval().double()
    randomise(model)
    return model


@pytest.mark.parametrize("changes", [{}, {"representation_size": 9}, {"patch_size": 16}], ids=str)
def test_in_and_out_again(changes: dict[str, Any], tmp_path: Path) -> None:
    judge = small(**changes)
    torch.save(judge.state_dict(), tmp_path / "vit.pth")
    with pytest.warns(LoadWarning, match="preprocessing"):
        ours = load(tmp_path / "vit.pth", heads=3)
    assert ours.config.position_resize == "bicubic-corners"
    assert ours.preprocess.mean == IMAGENET_MEAN
    x = torch.randn(2, 3, 32, 32, dtype=torch.double)
    with torch.no_grad():
        assert distance(ours(x), judge(x)) < 1e-5
        with disturbed(judge.encoder.layers[1].self_attention.in_proj_weight):
            assert distance(ours(x), judge(x)) > 1e-5

    with pytest.warns(LoadWarning, match="preprocessing"):
        convert(tmp_path / "vit.pth", tmp_path / "again.pth", to="torchvision", heads=3)
    again = torch.load(tmp_path / "again.pth", weights_only=True)
    twin = torchvision.models.VisionTransformer(**SIZES | changes).double()
    twin.load_state_dict(again, strict=True)
    assert all(same(tensor, again[name]) for name, tensor in judge.state_dict().items())
    assert load(tmp_path / "again.pth").config == ours.config  # heads need not be said again


def test_a_published_file(tmp_path: Path) -> None:
    """Its MLPs have older names, its preprocessing is known by its own, its heads by its width."""
    judge = small(hidden_dim=192)
    names = {".mlp.0.": ".mlp.linear_1.", ".mlp.3.": ".mlp.linear_2."}
    state = {}
    for name, tensor in judge.state_dict().items():
        for new, old in names.items():
            name = name.replace(new, old)
        state[name] = tensor
    assert sum("linear_" in name for name in state) == 8
    torch.save(state, tmp_path / "vit_b_16-c867db91.pth")
    with pytest.warns(LoadWarning, match=r"assumed heads=3; norm_eps=1e-06$"):
        ours = load(tmp_path / "vit_b_16-c867db91.pth")
    assert (ours.preprocess.resize, ours.config.heads) == (256, 3)
    x = torch.randn(2, 3, 32, 32, dtype=torch.double)
    with torch.no_grad():
        assert distance(ours(x), judge(x)) < 1e-5


def test_a_papers_model_needs_no_warning(tmp_path: Path) -> None:
    """Whose width, depth and MLP are as published has the heads that were published."""
    sizes = {"hidden_dim": 192, "num_layers": 12, "mlp_dim": 768}
    torch.save(small(**sizes).state_dict(), tmp_path / "vit_b_16-c867db91.pth")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(tmp_path / "vit_b_16-c867db91.pth").config.heads == 3


def test_resized_as_torchvision_does(tmp_path: Path) -> None:
    judge = small()
    torch.save(judge.state_dict(), tmp_path / "vit.pth")
    resized = torchvision.models.vision_transformer.interpolate_embeddings(48, 8, judge.state_dict())
    larger = torchvision.models.VisionTransformer(**SIZES | {"image_size": 48}).double().eval()
    larger.load_state_dict(resized)
    with pytest.warns(LoadWarning) as said:
        ours = load(tmp_path / "vit.pth", heads=3, image_size=48)
    assert any("resized from 4x4 to 6x6" in str(warning.message) for warning in said)
    x = torch.randn(2, 3, 48, 48, dtype=torch.double)
    with torch.no_grad():
        assert distance(ours(x), larger(x)) < 1e-5


def test_preprocessing_and_labels_travel(tmp_path: Path, tiny_folder: Any) -> None:
    folder = tiny_folder(labels=("ant", "bee", "cat", "dog", "eel"), dropout=0.1, norm_eps=1e-5)
    convert(folder, tmp_path / "vit.pth", to="torchvision")
    ours, back = load(folder), load(tmp_path / "vit.pth")
    assert (back.config, back.labels, back.preprocess) == (ours.config, ours.labels, ours.preprocess)
    loaded = torch.load(io.BytesIO((tmp_path / "vit.pth").read_bytes()), weights_only=True)
    assert all(isinstance(tensor, torch.Tensor) for tensor in loaded.values())


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"image_size": (32, 48)}, "image_size"),
        ({"patch": (8, 4)}, "patch"),
        ({"image_size": 30}, "no multiple"),
        ({"classes": 0}, "classes=0"),
        ({"positions": "sincos"}, "positions='sincos'"),
        ({"pool": "mean"}, "pool='mean'"),
        ({"qkv_bias": False}, "qkv_bias=False"),
        ({"mlp": "relu"}, "mlp='relu'"),
        ({"mlp": "swiglu"}, "mlp='swiglu'"),
        ({"norm_after_pool": True}, "norm_after_pool=True"),
        ({"drop_path": 0.1}, "drop_path=0.1"),
        ({"distillation_token": True}, "distillation_token"),
        ({"registers": 1}, "register_tokens"),
        ({"layer_scale": 0.1}, "attention_scale.gain"),
        ({"qk_norm": True}, "query_norm"),
    ],
    ids=str,
)
def test_what_torchvision_cannot_say(
    changes: dict[str, Any], field: str, tmp_path: Path, tiny_folder: Any
) -> None:
    with pytest.raises(SaveError, match=field):
        convert(tiny_folder(**changes), tmp_path / "out.pth", to="torchvision")
    assert not (tmp_path / "out.pth").exists()


@pytest.mark.parametrize("family", ["resnet18", "swin_t", "vgg11"])
def test_other_families_are_refused(family: str, tmp_path: Path) -> None:
    with torch.device("meta"):
        shapes = getattr(torchvision.models, family)().state_dict()
    torch.save({name: torch.zeros(1) for name in shapes}, tmp_path / f"{family}.pth")
    with pytest.raises(LoadError, match="no family that can be read: expected a Vision Transformer"):
        load(tmp_path / f"{family}.pth")
