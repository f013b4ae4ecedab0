"""What may change at load and what may not, and what is said of it."""

import json
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import vitrail
from compare import distance, disturbed, same
from judges import timm
from tiny import TINY, tiny
from vitrail.positions import resize_positions
from vitrail.tokens import Grid
from vitrail.weights import LoadError, LoadWarning, load, save

LABELS = ("ant", "bee", "cat", "dog", "eel")


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    model = tiny(labels=LABELS, registers=2, layer_scale=0.1, stem="conv", drop_path=0.3)
    save(model, tmp_path / "m")
    back = load(tmp_path / "m")
    assert (back.config, back.labels, back.preprocess) == (model.config, LABELS, model.preprocess)
    states = model.state_dict(), back.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(same(states[0][name], states[1][name]) for name in states[0])
    assert all(parameter.requires_grad for parameter in back.parameters())
    assert not back.training
    x = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        assert same(model(x), back(x))


def test_the_public_names() -> None:
    assert vitrail.load is load
    assert vitrail.save is save


@pytest.mark.parametrize("by", ["classes", "labels"])
def test_another_number_of_classes(by: str, tmp_path: Path) -> None:
    model = tiny(labels=LABELS)
    save(model, tmp_path / "m")
    new = {"classes": 3} if by == "classes" else {"labels": ["x", "y", "z"]}
    with pytest.warns(LoadWarning, match="head for 5 classes was left out; the one for 3 is new"):
        back = load(tmp_path / "m", **new)
    assert back.labels == tuple(new.get("labels", ()))
    assert back.head.weight.shape == (3, 48)
    assert 0 < back.head.weight.std() < 0.1
    assert back.head.bias.abs().max() == 0
    states = model.state_dict(), back.state_dict()
    assert all(same(states[0][n], states[1][n]) for n in states[0] if not n.startswith("head"))


def test_no_classes_at_all(tmp_path: Path) -> None:
    model = tiny()
    save(model, tmp_path / "m")
    with pytest.warns(LoadWarning, match="its head for 5 classes was left out$"):
        back = load(tmp_path / "m", classes=0)
    x = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        assert same(back(x), model.features(x))


def test_a_first_head(tmp_path: Path) -> None:
    save(tiny(classes=0, representation=9), tmp_path / "m")
    with pytest.warns(LoadWarning, match="the one for 4 is new"):
        assert load(tmp_path / "m", classes=4)(torch.randn(1, 3, 32, 32)).shape == (1, 4)


def test_both_heads_of_deit(tmp_path: Path) -> None:
    save(tiny(distillation_token=True), tmp_path / "m")
    with pytest.warns(LoadWarning, match="the one for 4 is new"):
        back = load(tmp_path / "m", classes=4)
    assert back.distillation_head.weight.shape == back.head.weight.shape == (4, 48)


def test_as_many_labels_only_name(tmp_path: Path) -> None:
    model = tiny()
    save(model, tmp_path / "m")
    back = load(tmp_path / "m", labels=LABELS)
    assert back.labels == LABELS
    assert same(back.head.weight.detach(), model.head.weight.detach())


def test_labels_and_classes_that_disagree(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="2 labels were given for classes=3"):
        load(tmp_path, classes=3, labels=["a", "b"])


@pytest.mark.parametrize("size", [(48, 40), (64, 16), (40, 32)], ids=str)
@pytest.mark.parametrize("rule", ["bicubic", "bilinear-corners"])
def test_another_image_size(size: tuple[int, int], rule: str, tmp_path: Path) -> None:
    """(64, 16) has as many patches as (32, 32), in another order."""
    model = tiny(position_resize=rule)
    save(model, tmp_path / "m")
    with pytest.warns(LoadWarning, match="learned positions were resized from 4x4 to"):
        back = load(tmp_path / "m", image_size=size)
    assert (back.config.image_size, back.preprocess.size) == (size, size)
    expected = resize_positions(
        model.positions.table, Grid(4, 4), Grid(size[0] // 8, size[1] // 8), prefix=1, rule=rule
    )
    assert same(back.positions.table.detach(), expected.detach())
    x = torch.randn(1, 3, *size)
    with torch.no_grad():
        assert same(back(x), model(x))


def test_the_same_grid_needs_no_resizing(tmp_path: Path) -> None:
    model = tiny()
    save(model, tmp_path / "m")
    back = load(tmp_path / "m", image_size=(30, 31))
    assert same(back.positions.table.detach(), model.positions.table.detach())


def test_changes_that_ask_for_no_other_tensors(tmp_path: Path) -> None:
    save(tiny(), tmp_path / "m")
    back = load(tmp_path / "m", drop_path=0.2, dropout=0.1, pool="mean", norm_eps=1e-5)
    config = back.config
    assert (config.drop_path, config.dropout, config.pool, config.norm_eps) == (0.2, 0.1, "mean", 1e-5)
    assert back.blocks[-1].drop_path.rate == 0.2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"registers": 4}, r"registers=4: that asks for other tensors than it has \(register_tokens"),
        ({"depth": 3}, r"depth=3.*blocks.2"),
        ({"depth": 1}, r"depth=1.*blocks.1"),
        ({"width": 96}, "width=96"),
        ({"patch": 16}, "patch"),
        ({"qkv_bias": False}, "qkv_bias=False"),
        ({"layer_scale": 0.1}, "layer_scale=0.1"),
        ({"class_token": False, "pool": "mean"}, "class_token"),
        ({"pool": "middle"}, "pool='middle'"),
        ({"classes": -1}, "classes|-1"),
        ({"heads": 5}, "does not divide into 5 heads"),
        ({"nonsense": 1}, "has no field 'nonsense'"),
        ({"image_size": "large"}, "image_size='large'"),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::vitrail.weights.LoadWarning")
def test_changes_that_do(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    save(tiny(), tmp_path / "m")
    with pytest.raises(LoadError, match=reason):
        load(tmp_path / "m", **changes)


@pytest.mark.parametrize(
    ("kept", "asked", "result"),
    [
        (torch.float32, None, torch.float32),
        (torch.float16, None, torch.float16),
        (torch.bfloat16, None, torch.bfloat16),
        (torch.float64, None, torch.float64),
        (torch.float16, torch.float32, torch.float32),
        (torch.float32, "bfloat16", torch.bfloat16),
        (torch.float32, "torch.float16", torch.float16),
    ],
)
def test_types(
    kept: torch.dtype, asked: torch.dtype | str | None, result: torch.dtype, tmp_path: Path
) -> None:
    save(tiny(stem="conv").to(kept), tmp_path / "m")
    back = load(tmp_path / "m", dtype=asked)
    types = {tensor.dtype for tensor in back.state_dict().values()}
    assert types == {result, torch.int64}  # batch norms count in whole numbers


@pytest.mark.parametrize("kind", ["half", "float8_e4m3fn", torch.int64, 16])
def test_types_that_weights_cannot_have(kind: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown dtype .*expected one of: float16, bfloat16, float32"):
        load(tmp_path, dtype=kind)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_half_precision_classifies(kind: torch.dtype, tmp_path: Path) -> None:
    """Pictures as preprocess gives them, float32, are of the weights' type when they are needed."""
    save(tiny(labels=LABELS).to(kind), tmp_path / "m")
    half, whole = load(tmp_path / "m"), load(tmp_path / "m", dtype=torch.float32)
    images = torch.stack([half.preprocess(Image.effect_noise((40, 50), 80).convert("RGB"))])
    with torch.no_grad():
        assert distance(half(images).float(), whole(images)) < 0.05
        with vitrail.record(half) as seen:
            half(images)
    assert len(seen) == 2


@pytest.mark.parametrize("covered", [(0, 3), (1, 3), (3, 1), (3, 0), (1, 0), (None, 1), (2, None)], ids=str)
def test_positions_of_fewer_special_tokens(covered: tuple[int | None, int | None], tmp_path: Path) -> None:
    model = tiny(registers=2, positioned_tokens=covered[0]).double()
    save(model, tmp_path / "m")
    with pytest.warns(LoadWarning, match="so that the answers stay the same"):
        back = load(tmp_path / "m", positioned_tokens=covered[1])
    x = torch.randn(1, 3, 32, 32, dtype=torch.double)
    with torch.no_grad():
        assert distance(back(x), model(x)) < 1e-12
        with disturbed(back.register_tokens):
            assert distance(back(x), model(x)) > 1e-5


def test_positions_of_fewer_tokens_at_another_size(tmp_path: Path) -> None:
    model = tiny(registers=2, positioned_tokens=1)
    save(model, tmp_path / "m")
    with pytest.warns(LoadWarning, match=r"0 of the special tokens have|were resized from 4x4 to 6x6"):
        back = load(tmp_path / "m", positioned_tokens=0, image_size=48)
    x = torch.randn(1, 3, 48, 48)
    with torch.no_grad():
        assert distance(back(x), model(x)) < 1e-5


def test_mixed_types_become_the_widest(tmp_path: Path) -> None:
    save(tiny(), tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    state = load_file(file)
    state["norm.weight"] = state["norm.weight"].half()
    save_file(state, file)
    assert {tensor.dtype for tensor in load(tmp_path / "m").state_dict().values()} == {torch.float32}


def test_the_default_device_is_respected(tmp_path: Path) -> None:
    save(tiny(), tmp_path / "m")
    with torch.device("meta"):
        assert {tensor.device.type for tensor in load(tmp_path / "m").parameters()} == {"meta"}


def test_the_file_can_go(tmp_path: Path) -> None:
    """Nothing loaded is a window onto the file."""
    model = tiny()
    save(model, tmp_path / "m")
    back = load(tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    file.write_bytes(b"\xff" * file.stat().st_size)
    states = model.state_dict(), back.state_dict()
    assert all(same(states[0][name], states[1][name]) for name in states[0])


def test_no_weights_are_made_up_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tiny(), tmp_path / "m")
    drawn = []
    fill = torch.Tensor.uniform_
    monkeypatch.setattr(
        torch.Tensor,
        "uniform_",
        lambda self, *a, **k: (drawn.append(self.device.type), fill(self, *a, **k))[1],
    )
    load(tmp_path / "m")
    assert set(drawn) <= {"meta"}


def test_random_state_is_left_alone(tmp_path: Path) -> None:
    save(tiny(), tmp_path / "m")
    before = torch.random.get_rng_state()
    load(tmp_path / "m")
    assert same(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("harm", ["missing", "unexpected", "misshapen"])
def test_our_own_are_accounted_for_too(harm: str, tmp_path: Path) -> None:
    save(tiny(), tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    state = load_file(file)
    if harm == "missing":
        del state["norm.bias"]
    else:
        state["more" if harm == "unexpected" else "norm.bias"] = torch.zeros(3)
    save_file(state, file)
    with pytest.raises(
        LoadError, match=r"1 (missing: norm.bias|unexpected: more|of another shape: norm.bias)"
    ):
        load(tmp_path / "m")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": 2}, "written by a newer Vitrail .* upgrade"),
        ({"version": "new"}, "makes no sense"),
        ({"system": "vitt"}, "system 'vitt' is not known; did you mean"),
        ({"system": None}, "makes no sense"),
        ({"config": None}, "makes no sense"),
        ({"config": {"wdith": 3}}, "has no field 'wdith'"),
        ({"config": {**TINY, "patch": 8, "depth": 10**9}}, "depth=1000000000"),
        ({"config": {**TINY, "patch": 8, "depth": -1}}, "."),
        ({"config": {**TINY, "patch": 8, "width": 3 * 10**9}}, "."),
        ({"config": {**TINY, "patch": 8, "image_size": 10**15}}, "."),
        ({"config": {**TINY, "patch": 8, "registers": 10**15}}, "."),
        ({"config": {**TINY, "patch": 0}}, "."),
        ({"config": {**TINY, "patch": 8, "stem": "resnet", "resnet_units": [10**9]}}, "resnet_units"),
        ({"preprocess": {}}, "preprocessing lacks"),
        ({"labels": ["a"]}, "1 labels were given for 5 classes"),
        ({"labels": 3}, "makes no sense"),
        ({"labels": None}, "makes no sense"),
    ],
    ids=str,
)
def test_configs_that_make_no_sense(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    save(tiny(), tmp_path / "m")
    file = tmp_path / "m" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    start = time.perf_counter()
    with pytest.raises(LoadError, match=reason):
        load(tmp_path / "m")
    assert time.perf_counter() - start < 5


def test_real_photos_get_the_answers_of_timm(shared: Path) -> None:
    """From file to logits, each library by its own means; and most of the answers are right."""
    folder, photos = shared / "weights" / "vit_tiny_patch16_224", shared / "data" / "imagenet_samples"
    files = sorted(photos.glob("*.JPEG"))
    if not files:
        pytest.skip(f"needs real photos: none in {photos}")
    chosen = range(0, len(files), len(files) // 23)  # 24 of them, over all kinds
    ours = load(folder)
    judge = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    prepare = timm.data.create_transform(**timm.data.resolve_data_config({}, model=judge))
    with torch.no_grad():
        mine = ours(torch.stack([ours.preprocess(files[at]) for at in chosen]))
        pixels = torch.stack([prepare(Image.open(files[at]).convert("RGB")) for at in chosen])
        theirs = judge(pixels)
        assert distance(mine, theirs) < 1e-5
        assert mine.argmax(1).tolist() == theirs.argmax(1).tolist()
        with disturbed(judge.blocks[3].attn.qkv.weight):
            assert distance(mine, judge(pixels)) > 1e-5
    right = sum(int(answer) == 2 * at for answer, at in zip(mine.argmax(1), chosen, strict=True))
    assert right > 0.7 * len(chosen)  # the photos are of every second class


def test_the_real_one(shared: Path) -> None:
    folder = shared / "weights" / "vit_tiny_patch16_224"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = load(folder)
    judge = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    assert sum(parameter.numel() for parameter in ours.parameters()) == 5_717_416
    assert (ours.preprocess.resize, ours.preprocess.size) == (248, (224, 224))
    x = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        assert same(ours(x), judge(x))
