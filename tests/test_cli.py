"""The commands, as a person types them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

import vitrail
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


def test_unknown_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["convert", "a", "b", "--to", "onnx"],
        ["models", "--image-size", "0"],
        ["frobnicate"],
        [],
    ):
        with pytest.raises(SystemExit) as left:
            main(arguments)
        assert left.value.code == 2
    assert "Traceback" not in capsys.readouterr().err
