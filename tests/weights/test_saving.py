"""Saved whole or not at all, and converted without loss."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import vitrail
from compare import distance, same
from judges import timm, transformers
from tiny import tiny
from vitrail.weights import FORMS, SaveError, convert, load, save

LABELS = ("ant", "bee", "cat", "dog", "eel")


def equal(one: nn.Module, other: nn.Module) -> bool:
    states = one.state_dict(), other.state_dict()
    return states[0].keys() == states[1].keys() and all(
        same(tensor, states[1][name]) for name, tensor in states[0].items()
    )


def test_what_is_in_the_folder(tmp_path: Path) -> None:
    model = tiny(labels=LABELS)
    save(model, tmp_path / "new" / "folder")
    assert sorted(file.name for file in (tmp_path / "new" / "folder").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    content = json.loads((tmp_path / "new" / "folder" / "config.json").read_text())
    assert content["format"] == "vitrail"
    assert content["labels"] == list(LABELS)
    assert content["config"]["width"] == 48
    with safe_open(tmp_path / "new" / "folder" / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(model.state_dict())
        assert file.metadata() == {"format": "pt"}


def compiled_inside(model: nn.Module) -> nn.Module:
    model.blocks[0] = torch.compile(model.blocks[0])
    return model


def distributed(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


@pytest.fixture
def process_group(tmp_path: Path) -> Any:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore::FutureWarning:torch")
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    "wrap",
    [
        torch.compile,
        compiled_inside,
        nn.DataParallel,
        distributed,
        lambda model: torch.compile(distributed(model)),
        lambda model: distributed(torch.compile(model)),
    ],
    ids=["compiled", "a compiled block", "parallel", "distributed", "both", "both, the other way"],
)
def test_wrappers_leave_no_trace(wrap: Any, tmp_path: Path) -> None:
    plain = tiny(labels=LABELS)
    names = set(plain.state_dict())
    save(wrap(plain), tmp_path / "m")
    assert set(load_file(tmp_path / "m" / "model.safetensors")) == names
    assert load(tmp_path / "m").labels == LABELS


def test_views_and_shared_tensors(tmp_path: Path) -> None:
    model = tiny()
    whole = torch.randn(4, 48)
    model.norm.weight = nn.Parameter(whole[1])  # a window onto more
    model.norm.bias = nn.Parameter(whole[:, 0].repeat(12))
    model.blocks[0].mlp.up.weight = nn.Parameter(torch.randn(48, 96).t())  # not contiguous
    model.blocks[1].mlp.up.weight = model.blocks[0].mlp.up.weight  # shared
    save(model, tmp_path / "m")
    assert equal(load(tmp_path / "m"), model)
    assert (tmp_path / "m" / "model.safetensors").stat().st_size < 450_000


def test_saving_again_replaces(tmp_path: Path) -> None:
    save(tiny(), tmp_path / "m")
    model = tiny(labels=LABELS)
    save(model, tmp_path / "m")
    assert equal(load(tmp_path / "m"), model)
    assert load(tmp_path / "m").labels == LABELS
    assert [file.name for file in tmp_path.iterdir()] == ["m"]


def test_an_empty_folder_will_do(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    save(tiny(), tmp_path / "m")
    load(tmp_path / "m")


def test_through_a_link(tmp_path: Path) -> None:
    save(tiny(), tmp_path / "m")
    (tmp_path / "link").symlink_to(tmp_path / "m")
    model = tiny()
    save(model, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert equal(load(tmp_path / "m"), model)


def test_the_usual_permissions(tmp_path: Path) -> None:
    (tmp_path / "usual").mkdir()
    (tmp_path / "usual.txt").touch()
    save(tiny(), tmp_path / "m")
    assert (tmp_path / "m").stat().st_mode == (tmp_path / "usual").stat().st_mode
    for file in (tmp_path / "m").iterdir():
        assert file.stat().st_mode == (tmp_path / "usual.txt").stat().st_mode, file.name


@pytest.mark.parametrize(
    "holds",
    [
        {"notes.txt": "mine"},
        {"config.json": '{"architecture": "vit_tiny_patch16_224"}', "model.safetensors": "x"},
        {"config.json": '{"format": "vitrail"}', "model.safetensors": "x", "optimizer.pt": "x"},
        {"model.safetensors": "x"},
        {"config.json": "not json"},
    ],
    ids=lambda holds: ", ".join(holds),
)
def test_other_folders_are_left_alone(holds: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    for name, text in holds.items():
        (folder / name).write_text(text)
    with pytest.raises(SaveError, match="holds something else than a saved model"):
        save(tiny(), folder)
    assert {file.name: file.read_text() for file in folder.iterdir()} == holds


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "m").write_text("mine")
    with pytest.raises(SaveError, match="is a file; expected a folder"):
        save(tiny(), tmp_path / "m")
    assert (tmp_path / "m").read_text() == "mine"


def test_only_our_models(tmp_path: Path) -> None:
    with pytest.raises(SaveError, match="Linear is no model of Vitrail"):
        save(nn.Linear(2, 2), tmp_path / "m")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "step",
    [
        "vitrail.weights.writing.save_file",
        "vitrail.weights.native.write_json",
        "vitrail.weights.writing._flush",
        "pathlib.Path.rename",  # setting the old aside
        "pathlib.Path.replace",  # putting the new in its place
    ],
)
@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()], ids=repr)
def test_a_failure_midway_changes_nothing(
    step: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(labels=LABELS)
    save(model, tmp_path / "m")

    def fail(*_: Any, **__: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(step, fail)
        with pytest.raises(type(error)):
            save(tiny(), tmp_path / "m")
    assert equal(load(tmp_path / "m"), model)
    assert load(tmp_path / "m").labels == LABELS
    assert [file.name for file in tmp_path.iterdir()] == ["m"]


def test_a_kill_midway_leaves_the_old(tmp_path: Path) -> None:
    """By the hardest signal, while the weights are being written."""
    model = tiny()
    save(model, tmp_path / "m")
    script = (
        "import os, signal, sys, vitrail\n"
        "from vitrail.weights import native\n"
        "native.write_json = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "vitrail.save(vitrail.create('vit-ti/16', depth=1), sys.argv[1])\n"
    )
    run = subprocess.run([sys.executable, "-c", script, str(tmp_path / "m")], capture_output=True)
    assert run.returncode == -signal.SIGKILL
    assert equal(load(tmp_path / "m"), model)
    other = tiny()
    save(other, tmp_path / "m")  # what the killed one left beside is in nobody's way
    assert equal(load(tmp_path / "m"), other)


def chain(source: Path, folder: Path) -> dict[str, Path]:
    """timm → vitrail → transformers → npz → vitrail → timm, and torchvision."""
    places = {
        "vitrail": folder / "ours",
        "transformers": folder / "transformers",
        "npz": folder / "weights.npz",
        "again": folder / "again",
        "timm": folder / "timm",
        "torchvision": folder / "vision.pth",
    }
    for form, place in places.items():
        convert(source, place, to="vitrail" if form == "again" else form)
        source = place
    return places


def test_round_and_round(tmp_path: Path) -> None:
    judge = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=5
    ).eval()
    timm.models.save_for_hf(
        judge, tmp_path / "theirs", safe_serialization=True, model_config={"label_names": list(LABELS)}
    )
    first = load(tmp_path / "theirs")
    x = torch.randn(2, 3, 32, 32)
    for form, place in chain(tmp_path / "theirs", tmp_path).items():
        model = load(place)
        assert equal(model, first), form
        assert (model.config, model.labels) == (first.config, LABELS), form
        assert model.preprocess == first.preprocess, form
        with torch.no_grad():
            assert same(model(x), first(x)), form
            assert distance(model(x), judge(x)) < 1e-5, form


def test_the_real_one_round_and_round(shared: Path, tmp_path: Path) -> None:
    source = shared / "weights" / "vit_tiny_patch16_224"
    first = load(source)
    places = chain(source, tmp_path)
    for place in places.values():
        assert equal(load(place), first)
    x = torch.randn(1, 3, 224, 224)
    theirs = transformers.AutoModelForImageClassification.from_pretrained(places["transformers"]).eval()
    judge = timm.create_model(f"local-dir:{places['timm']}", pretrained=True).eval()
    with torch.no_grad():
        assert same(judge(x), first(x))
        assert distance(theirs(x).logits, first(x)) < 1e-5


@pytest.mark.parametrize("to", FORMS)
def test_conversion_replaces_nothing(to: str, tmp_path: Path, tiny_folder: Any) -> None:
    source = tiny_folder()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    for target in (tmp_path / "out", tmp_path / "out" / "mine", source):
        with pytest.raises(SaveError, match="exists already"):
            convert(source, target, to=to)
    assert (tmp_path / "out" / "mine").read_bytes() == b""
    convert(source, tmp_path / "fresh" / "out", to=to)
    assert equal(load(tmp_path / "fresh" / "out"), load(source))


def test_a_file_is_not_written_over_an_empty_folder(tmp_path: Path, tiny_folder: Any) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(SaveError, match="out is a folder; npz is a single file"):
        convert(tiny_folder(), tmp_path / "out", to="npz")


def test_forms_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"to='onnx' is no form of weights; .*vitrail"):
        convert(tmp_path, tmp_path / "out", to="onnx")


@pytest.mark.parametrize("to", FORMS)
def test_a_writer_that_errs_is_caught(
    to: str, tmp_path: Path, tiny_folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written is read again and compared, before it gets its name."""
    source, form = tiny_folder(), FORMS[to]

    def wrong(model: Any, place: Path) -> None:
        with torch.no_grad():
            model.norm.bias[0] += 1
        form.write(model, place)
        with torch.no_grad():
            model.norm.bias[0] -= 1

    monkeypatch.setitem(FORMS, to, form._replace(write=wrong))
    with pytest.raises(SaveError, match=f"{to} cannot hold norm.bias exactly"):
        convert(source, tmp_path / "out", to=to)
    assert not (tmp_path / "out").exists()


def test_what_is_not_a_number_survives(tmp_path: Path) -> None:
    model = tiny()
    with torch.no_grad():
        model.norm.bias[0] = float("nan")
    save(model, tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "out", to="timm")
    assert load(tmp_path / "out").norm.bias[0].isnan()


def test_features_of_dinov2_go_both_ways(tmp_path: Path) -> None:
    model = vitrail.create("dinov2-reg-s/14", width=48, depth=2, heads=3, mlp_width=192, image_size=28)
    save(model, tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "out", to="transformers")
    assert equal(load(tmp_path / "out"), model)
    assert os.listdir(tmp_path / "out")
