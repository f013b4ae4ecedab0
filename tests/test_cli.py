"""The commands, as a person types them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from vitrail import cli
from vitrail.cli import main


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


def test_help_names_every_command() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "vitrail", "--help"], capture_output=True, text=True, check=True
    )
    for command in ("models", "convert", "look"):
        assert command in run.stdout


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


def test_look_says_and_draws(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos = tmp_path / "my photos"
    photos.mkdir()
    for name in ("a.png", "b.jpg"):
        Image.effect_noise((40, 30), 80).save(photos / name)
    (photos / "broken.png").write_bytes(b"no picture")
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
        ["frobnicate"],
        [],
    ):
        with pytest.raises(SystemExit) as left:
            main(arguments)
        assert left.value.code == 2
    assert "Traceback" not in capsys.readouterr().err
