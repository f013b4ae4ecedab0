"""The commands, as a person types them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from vitrail import cli
from vitrail.cli import main
from vitrail.learn.processes import DEVICES
from vitrail.weights.forms import FORMS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in a folder with a space in its name."""
    folder = tmp_path_factory.mktemp("a place") / "my model"
    net = vitrail.create(
        "vit-ti/8",
        width=24,
        depth=2,
        heads=2,
        mlp_width=32,
        image_size=(16, 24),
        labels=("cat", "dog", "hen"),
    )
    vitrail.save(net, folder)
    return folder


COMMANDS = ("train", "evaluate", "predict", "probe", "models", "convert", "look")


def test_help_names_every_command() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "vitrail", "--help"], capture_output=True, text=True, check=True
    )
    for command in COMMANDS:
        assert command in run.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_in_the_help_are_commands(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    _, examples = capsys.readouterr().out.split("examples:\n")
    for example in examples.strip().splitlines():
        vitrail, *words = example.split()
        assert vitrail == "vitrail"
        found, rest = cli._parser().parse_known_args(words)
        assert found.command
        assert all("=" in word for word in rest)


def test_choices_are_those_of_the_rooms() -> None:
    assert list(cli.FORMATS) == list(FORMS)
    assert cli.DEVICES == DEVICES


@pytest.mark.parametrize(
    ("arguments", "source", "changes"),
    [
        ("epochs=3 --out d photos", "photos", ["epochs=3"]),
        ("photos --out d --resume epochs=5", "photos", ["epochs=5"]),
        ("--out d my.toml epochs=3 --strict lr=1 epochs=5", "my.toml", ["epochs=3", "lr=1", "epochs=5"]),
        ("--resume --out d", None, []),
    ],
)
def test_words_and_options_in_any_order(
    arguments: str, source: str | None, changes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(
        "vitrail.learn.train.train", lambda *words, **options: given.extend([*words, options["out"]])
    )
    assert main(["train", *arguments.split()]) == 0
    assert given == [source, changes, Path("d")]


@pytest.mark.parametrize("command", ["evaluate", "predict", "probe"])
def test_judging_on_a_device(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    monkeypatch.setattr(
        f"vitrail.learn.{command}.{command}", lambda *_, **options: given.append(options["device"])
    )
    for words in ([], ["--device", "mps"]):
        assert main([command, "model", "photos", *words]) == 0
    assert given == ["auto", "mps"]


def test_models_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "vit-ti/16", "vit-s/7", "--image-size", "224x320", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["name"] for row in rows] == ["vit-ti/16", "vit-s/7"]
    assert rows[0]["tokens"] == 1 + 14 * 20
    assert rows[1]["tokens"] == 1 + 32 * 46  # 320 / 7 = 45.7: the last column is padded


def test_models_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    for text in ("86,567,656", "632,045,800", "112.5 MiB", "192.0 MiB", "768.0 GiB"):
        assert text in out


def test_convert_there_and_back(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(model), str(tmp_path / "hf"), "--to", "transformers"]) == 0
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "back")]) == 0
    ours, back = vitrail.load(model), vitrail.load(tmp_path / "back")
    assert back.labels == ("cat", "dog", "hen")
    theirs = back.state_dict()
    assert all(tensor.equal(theirs[name]) for name, tensor in ours.state_dict().items())
    assert "transformers" in capsys.readouterr().out


def test_convert_changes_the_configuration(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["convert", str(model), str(tmp_path / "a"), "norm_eps=1e-5", "--to", "timm", "width=48"]) == 2
    )
    assert "width=48" in capsys.readouterr().err
    out = tmp_path / "b"
    assert main(["convert", str(model), str(out), "norm_eps=1e-5", "--to", "vitrail", "drop_path=0.1"]) == 0
    config = vitrail.load(out).config
    assert (config.norm_eps, config.drop_path) == (1e-5, 0.1)
    for word in ("to=timm", "labels=abc", "timm"):
        assert main(["convert", str(model), str(tmp_path / "c"), word]) == 2
        assert f"{word!r} is no change to a configuration" in capsys.readouterr().err


def test_look_says_and_draws(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos = tmp_path / "my photos"
    photos.mkdir()
    for name in ("a.png", "b.jpg"):
        Image.effect_noise((40, 30), 80).save(photos / name)
    (photos / "broken.png").write_bytes(b"no picture")
    (photos / "__MACOSX").mkdir()
    shutil.copy(photos / "a.png", photos / "__MACOSX" / "c.png")
    (photos / "folder.jpg").mkdir()
    assert main(["look", str(photos), "--model", str(model), "--out", str(tmp_path / "out")]) == 2
    out, err = capsys.readouterr()
    assert "broken.png" in err
    assert out.count("every layer") == 2
    assert all(label in out for label in ("cat", "dog", "hen"))
    drawn = sorted((tmp_path / "out").iterdir())
    assert len(drawn) == 2
    with Image.open(drawn[0]) as picture:
        assert picture.size == (4 * (24 + 8) + 8, 2 * 18 + 16 + 18 + 8)  # a title, one row


def test_look_without_anything_draws_shapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["look", "--out", str(tmp_path)]) == 0
    assert "random" in capsys.readouterr().out
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["models", "vit-b16"], ["vit-b16", "vit-b/16"]),
        (["convert", "nowhere/at-all", "out"], ["nowhere/at-all"]),
        (["look", "no-such.jpg"], ["no-such.jpg"]),
        (["look", "--model", "no-such-model"], ["no-such-model"]),
        (["look", "--model", "./no-such-model"], ["./no-such-model does not exist. Expected a folder"]),
    ],
)
def test_bad_input_gives_one_line_and_no_traceback(
    arguments: list[str], words: list[str], tmp_path: Path
) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "vitrail", *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert run.returncode == 2
    assert "Traceback" not in run.stderr
    assert run.stderr.startswith("vitrail: ")
    for word in words:
        assert word in run.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        "train photos more-photos",
        "train nowhere --from run",
        "train photos epochs",
        "train photos =3",
        "evaluate nowhere photos",
        "evaluate nowhere photos --device mps",
        "predict nowhere a.jpg --out .",
        "predict nowhere a.jpg --out a.xlsx",
        "probe nowhere photos",
        "models vit-b/0",
        "models vit-b/99999999999999999999",
        "convert nowhere out norm_eps",
        "convert nowhere out norm_eps=x classes=[]",
        "look --labels nowhere",
        "look --labels .",
        "look --out file",
    ],
)
def test_bad_input_is_answered_in_words(
    arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    assert main(arguments.split()) == 2
    assert capsys.readouterr().err.startswith("vitrail: ")


def _of_a_gpu() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")


@pytest.mark.parametrize(
    "use_up",
    [
        lambda: torch.empty(2**60),
        lambda: torch.empty(2**40, 2**40),
        lambda: torch.empty(2**70),
        lambda: np.empty(2**60, np.uint8),
        _of_a_gpu,
    ],
)
def test_where_memory_runs_out_that_is_said(
    use_up: Callable[[], object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "list_models", lambda **_: use_up())
    assert main(["models"]) == 2
    assert capsys.readouterr().err.startswith("vitrail: memory ran out; it takes less with a smaller batch (")


def test_other_errors_are_ours_and_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "list_models", lambda **_: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="size"):
        main(["models"])


def test_an_interruption_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "list_models", interrupted)
    assert main(["models"]) == 130
    assert capsys.readouterr().err == "vitrail: interrupted\n"


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_reader_that_has_seen_enough(options: list[str]) -> None:
    command = [sys.executable, "-m", "vitrail", "models", "vit-ti/16", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        run.stdout.close()
        assert run.stderr.read() == b""
    assert run.returncode == 0


def test_sizes_that_nobody_can_count(capsys: pytest.CaptureFixture[str]) -> None:
    for size in ("999999999", "9" * 20):
        assert main(["models", "vit-ti/16", "--image-size", size]) == 2
        assert f"vit-ti/16 at {size}x{size} is larger than torch can count" in capsys.readouterr().err


def test_labels_that_are_no_text_are_named(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "labels").write_bytes(b"\xff\xfe")
    assert main(["look", "--model", str(model), "--labels", str(tmp_path / "labels")]) == 2
    assert "labels cannot be read: expected text in UTF-8" in capsys.readouterr().err


def test_a_run_folder_stands_for_its_best_model(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "run" / "best")
    (tmp_path / "run" / "resume-0.safetensors").touch()
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "other")]) == 0
    assert vitrail.load(tmp_path / "other").labels == ("cat", "dog", "hen")
    assert main(["look", "--model", str(tmp_path / "run"), "--out", str(tmp_path / "looks")]) == 0


def test_a_name_that_is_no_text_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "list_models", lambda **_: print("run folder", os.fsdecode(b"runs/caf\xe9")))
    assert main(["models"]) == 2
    assert r"vitrail: 'runs/caf\udce9' is of a name that is no text in UTF-8" in capsys.readouterr().err


def test_unknown_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["convert", "a", "b", "--to", "onnx"],
        ["models", "--image-size", "0"],
        ["models", "--image-size", "²"],
        ["probe", "model", "pictures", "--workers", "1000000"],
        ["evaluate", "model", "--batch", "9" * 20],
        ["train", "photos", "--device", "cpu"],
        ["frobnicate"],
        [],
    ):
        with pytest.raises(SystemExit) as left:
            main(arguments)
        assert left.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_two_processes_are_one_command(tmp_path: Path) -> None:
    noise = np.random.default_rng(0)
    for label in ("cat", "dog"):
        (tmp_path / "photos" / label).mkdir(parents=True)
        for number in range(12):
            pixels = noise.integers(0, 256, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / label / f"{number}.png")
    command = "-m torch.distributed.run --standalone --nproc-per-node=2 -m vitrail train epochs=1 batch=8"
    small = "photos precision=float32 model=vit-ti/8 model.width=24 model.depth=1 model.heads=2 device=cpu"
    run = subprocess.run(
        [sys.executable, *command.split(), "--out", "run", *small.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("processes: 2 (cpu)") == run.stdout.count("best validation") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["photos", "run"]
    assert vitrail.load(tmp_path / "run" / "best").labels == ("cat", "dog")
