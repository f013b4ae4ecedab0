"""Saved whole or not at all, and converted without loss."""

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

import vitrail
from compare import distance, disturbed, randomise, same
from judges import timm, transformers
from tiny import tiny
from vitrail.models import ViT
from vitrail.weights import FORMS, LoadWarning, SaveError, convert, load, save

LABELS = ("ant", "bee", "cat", "dog", "eel")


def ending(form: str) -> str:
    return next(iter(FORMS[form].endings), "")


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
    for umask, folder_mode, file_mode in (
        (0o022, 0o755, 0o644),
        (0o002, 0o775, 0o664),
        (0o077, 0o700, 0o600),
    ):
        place = tmp_path / oct(umask)
        before = os.umask(umask)
        try:
            save(tiny(), place / "ours")
            for form in FORMS:
                convert(place / "ours", place / f"out-{form}{ending(form)}", to=form)
        finally:
            os.umask(before)
        for path in place.rglob("*"):
            assert path.stat().st_mode & 0o777 == (folder_mode if path.is_dir() else file_mode), path


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
        with pytest.raises(SaveError if isinstance(error, OSError) else type(error)):
            save(tiny(), tmp_path / "m")
    assert equal(load(tmp_path / "m"), model)
    assert load(tmp_path / "m").labels == LABELS
    assert [file.name for file in tmp_path.iterdir()] == ["m"]


def test_an_interruption_between_the_two_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the old is already aside, and the next line not yet reached."""
    model = tiny(labels=LABELS)
    save(model, tmp_path / "m")
    rename = Path.rename

    def interrupted(path: Path, target: Path) -> Path:
        moved = rename(path, target)
        if path.name == "m":
            raise KeyboardInterrupt
        return moved

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", interrupted)
        with pytest.raises(KeyboardInterrupt):
            save(tiny(), tmp_path / "m")
    assert equal(load(tmp_path / "m"), model)
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
    fresh = tmp_path / "fresh" / f"out{ending(to)}"
    written = convert(source, fresh, to=to)
    assert equal(load(fresh), load(source))
    files = sorted(fresh.iterdir()) if fresh.is_dir() else [fresh]
    assert written == {file.name: file.stat().st_size for file in files}


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
    out = tmp_path / f"out{ending(to)}"
    with pytest.raises(SaveError, match=f"{to} cannot hold norm.bias exactly"):
        convert(source, out, to=to)
    assert not out.exists()


@pytest.mark.parametrize(
    ("to", "name", "reason"),
    [
        ("timm", "x.safetensors", "x.safetensors is the name of a file, and timm is a folder"),
        ("vitrail", "x.PT", "leave out .PT"),
        ("transformers", "pytorch_model.bin", "is the name of a file"),
        ("npz", "x", r"x is no name for npz, a file that ends in \.npz"),
        ("npz", "x.pth", r"ends in \.npz"),
        ("torchvision", "x.safetensors", r"ends in \.pth or \.pt"),
        ("torchvision", "x", r"ends in \.pth or \.pt"),
        ("npz", "notes.txt/x.npz", "notes.txt is a file, not a folder"),
        ("timm", "notes.txt/deep/x", "notes.txt is a file, not a folder"),
    ],
)
def test_the_target_is_checked_first(to: str, name: str, reason: str, tmp_path: Path) -> None:
    """Before the source, which is not there."""
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(SaveError, match=reason):
        convert(tmp_path / "none", tmp_path / name, to=to)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("where", ["notes.txt/m", "notes.txt/deep/m"])
def test_a_file_is_in_the_way(where: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(SaveError, match=r"m cannot be written: .*notes.txt is a file, not a folder"):
        save(tiny(), tmp_path / where)


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("os.access", lambda *_: False)
        with pytest.raises(SaveError, match=f"no permission to write in {tmp_path}$"):
            save(tiny(), tmp_path / "new" / "m")

    def refuse(prefix: str, dir: Path) -> str:
        raise PermissionError(13, "Permission denied", f"{dir}/{prefix}x7_y2")

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    with pytest.raises(SaveError, match=f"^{tmp_path / 'm'} cannot be written: this user has no permission$"):
        save(tiny(), tmp_path / "m")


@pytest.fixture
def small_files() -> Any:
    """The system lets nobody write more than 50 kB to a file, as if the disk were full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    @contextmanager
    def limited() -> Iterator[None]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    return limited


@pytest.mark.parametrize("to", FORMS)
def test_no_room(to: str, small_files: Any, tmp_path: Path, tiny_folder: Any) -> None:
    source, target = tiny_folder(), tmp_path / f"out{ending(to)}"
    expected = f"^{target} cannot be written: files of this size are not allowed there$"
    with small_files(), pytest.raises(SaveError, match=expected):
        convert(source, target, to=to)
    with small_files(), pytest.raises(SaveError, match="files of this size"):
        save(tiny(), tmp_path / "m")
    assert [file.name for file in tmp_path.iterdir()] == [source.name]


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device", ".m.x7_y2/new"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
    ids=repr,
)
def test_a_full_disk(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("vitrail.weights.writing.save_file", fail)
    with pytest.raises(SaveError, match=r"m cannot be written: the disk is full$"):
        save(tiny(), tmp_path / "m")


def with_head(head: nn.Module) -> nn.Module:
    model = tiny(classes=3)
    model.head = head
    return model


def with_changed(**attributes: Any) -> nn.Module:
    model = tiny(classes=3)
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


class Mine(ViT):
    """A class that no config.json can name."""


UNLOADABLE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "another head": (
        lambda: with_head(nn.Linear(48, 7)),
        r"head.weight is \(7, 48\), but model.config says 3 classes; load with classes=7 instead",
    ),
    "a compiled one with another head": (lambda: torch.compile(with_head(nn.Linear(48, 7))), "classes=7"),
    "no head": (
        lambda: with_head(nn.Identity()),
        r"2 missing: head.weight, head.bias\n.*classes=0 for no head",
    ),
    "a deeper head": (
        lambda: with_head(nn.Sequential(nn.Linear(48, 9), nn.Linear(9, 3))),
        "missing: head.weight, head.bias\n.*unexpected: head.0.weight",
    ),
    "no bias": (lambda: with_head(nn.Linear(48, 3, bias=False)), "1 missing: head.bias"),
    "another norm": (
        lambda: with_changed(norm=nn.LayerNorm(9)),
        r"norm.weight \(9,\) instead of \(48,\)",
    ),
    "fewer blocks": (lambda: with_changed(blocks=nn.ModuleList()), "missing: blocks.0"),
    "too few labels": (
        lambda: with_changed(labels=("a", "b")),
        "model.labels has 2 names, but model.config says 3 classes",
    ),
    "another config": (
        lambda: with_changed(config=replace(tiny().config, classes=4)),
        r"head.weight is \(3, 48\), but model.config says 4 classes",
    ),
    "eight bits": (lambda: tiny().to(torch.float8_e4m3fn), "expected 16, 32 or 64 bits"),
    "a class of one's own": (
        lambda: Mine(tiny().config, tiny().preprocess),
        "Mine is a class that load does not know",
    ),
}


@pytest.mark.parametrize("kind", UNLOADABLE)
def test_what_load_would_refuse_is_not_saved(kind: str, tmp_path: Path) -> None:
    make, reason = UNLOADABLE[kind]
    model = make()
    with pytest.raises(SaveError, match=f"(?s){reason}"):
        save(model, tmp_path / "new" / "m")
    assert not any(tmp_path.iterdir())


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


REGISTERED: dict[str, Any] = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3}


def test_registers_of_dinov2_from_transformers_to_timm_and_back(tmp_path: Path) -> None:
    """One has a position for the class token, the other for none; what is lost is added to the token."""
    judge = transformers.Dinov2WithRegistersModel(
        transformers.Dinov2WithRegistersConfig(**REGISTERED, image_size=28, patch_size=14)
    ).eval()
    randomise(judge)
    judge.save_pretrained(tmp_path / "hf")
    transformers.BitImageProcessor().save_pretrained(tmp_path / "hf")
    with pytest.raises(SaveError, match=r"positioned_tokens=1 .*; say positioned_tokens=0 on the way"):
        convert(tmp_path / "hf", tmp_path / "timm", to="timm")
    with pytest.warns(LoadWarning, match="0 of the special tokens have positions now instead of 1"):
        convert(tmp_path / "hf", tmp_path / "timm", to="timm", positioned_tokens=0)
    with pytest.raises(SaveError, match="say positioned_tokens=1 on the way"):
        convert(tmp_path / "timm", tmp_path / "again", to="transformers")
    with pytest.warns(LoadWarning, match="1 of the special tokens have positions now instead of 0"):
        convert(tmp_path / "timm", tmp_path / "again", to="transformers", positioned_tokens=1)

    twin = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
    again = transformers.AutoModel.from_pretrained(tmp_path / "again").eval()
    x = torch.randn(2, 3, 28, 28)
    with torch.no_grad():
        answer = judge(x).pooler_output
        assert distance(twin(x), answer) < 1e-5
        assert distance(again(x).pooler_output, answer) < 1e-5
        with disturbed(twin.reg_token):
            assert distance(twin(x), answer) > 1e-5


@pytest.mark.parametrize(
    ("to", "changes", "reason"),
    [
        ("npz", {"norm_eps": 1e-12}, r"norm_eps=1e-12 \(it would be 1e-06\); say norm_eps=1e-06 on the way$"),
        ("npz", {"mlp": "relu"}, r"mlp='relu' \(it would be 'gelu'\); it cannot be written in that form$"),
        ("timm", {"norm_eps": 1e-12, "pool": "class+mean"}, "it cannot be written in that form$"),
    ],
)
def test_the_hint_is_honest(
    to: str, changes: dict[str, Any], reason: str, tmp_path: Path, tiny_folder: Any
) -> None:
    """It names a change only where load can make it, and the answers are meant to stay."""
    with pytest.raises(SaveError, match=reason):
        convert(tiny_folder(**changes), tmp_path / f"out{ending(to)}", to=to)
