"""Rows of answers: in order, each file once, whatever the files are."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from PIL import Image

import vitrail
from tiny import tiny
from vitrail.learn.evaluate import evaluate
from vitrail.learn.predict import COLUMNS, expanded, predict

LABELS = ("ant", "bee", "cat", "dog", "Élan, grand")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model") / "tiny"
    vitrail.save(tiny(labels=LABELS), folder)
    return str(folder)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Eleven files, of which the first, three in a row and the last are bad."""
    folder = tmp_path_factory.mktemp("pictures")
    draw = np.random.default_rng(0)
    paths = [folder / f"{number:02}.png" for number in range(11)]
    for path in paths:
        Image.fromarray(draw.integers(0, 255, (40, 50, 3), dtype=np.uint8)).save(path)
    paths[0].write_bytes(b"")
    paths[3].write_text("not a picture")
    paths[4].write_bytes(paths[4].read_bytes()[:500])
    paths[5].unlink()
    paths[10].unlink()
    paths[10].mkdir()
    return [*paths[:10], folder / "10.png" / "nothing.png"]


BAD = [0, 3, 4, 5, 10]


def by_hand(model: str, path: Path) -> dict[str, float]:
    """Label → chance, of one picture alone."""
    net = vitrail.load(model)
    with torch.inference_mode():
        chances = net(net.preprocess(path)[None]).softmax(-1)[0]
    return dict(zip(LABELS, chances.tolist(), strict=True))


def check(rows: list[dict[str, Any]], model: str, pictures: list[Path]) -> None:
    assert [row["path"] for row in rows] == list(map(str, pictures))
    for number, (row, path) in enumerate(zip(rows, pictures, strict=True)):
        assert tuple(row) == COLUMNS
        if number in BAD:
            assert row["error"]
            assert not row["label"]
            assert not row["confidence"]
            assert row["top"] == []
            continue
        assert not row["error"]
        expected = by_hand(model, path)
        best = sorted(expected, key=lambda label: -expected[label])[:3]
        assert [each["label"] for each in row["top"]] == best
        assert row["label"] == best[0]
        chances = [each["confidence"] for each in row["top"]]
        assert chances == pytest.approx([expected[label] for label in best], abs=1e-5)
        assert float(row["confidence"]) == chances[0]


def read(file: Path) -> list[dict[str, Any]]:
    if file.suffix == ".parquet":
        return pyarrow.parquet.read_table(file).to_pylist()
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines()]
    return [{**row, "top": json.loads(row["top"])} for row in csv.DictReader(text.splitlines())]


@pytest.mark.parametrize("name", ["new/answers.csv", "answers.jsonl", "answers.parquet"])
@pytest.mark.parametrize("batch", [1, 4, 64])
def test_every_form(model: str, pictures: list[Path], tmp_path: Path, name: str, batch: int) -> None:
    assert predict(model, pictures, str(tmp_path / name), top=3, batch=batch) == len(BAD)
    check(read(tmp_path / name), model, pictures)


def test_to_the_terminal(model: str, pictures: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert predict(model, pictures[1:3]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header == "path,label,confidence,top,error"
    assert len(rows) == 2
    assert rows[0].startswith(f"{pictures[1]},")


def test_rows_are_there_before_the_last_picture_is_read(
    model: str, pictures: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vitrail.data.sources import Pictures

    out, seen = tmp_path / "answers.jsonl", []

    def data(self: Pictures, index: int) -> Any:
        seen.append(len(read(out)) if out.exists() else 0)
        return self.read(self.items[index])

    monkeypatch.setattr(Pictures, "data", data)
    predict(model, [pictures[1]] * 40, str(out), batch=1, workers=1)
    assert seen[-1] >= 30


def test_folders_are_searched_and_order_is_kept(pictures: list[Path]) -> None:
    folder = pictures[0].parent
    found = expanded([pictures[7], folder, "missing.jpg"])
    assert found[0] == str(pictures[7])
    assert found[1:-1] == sorted(str(path) for path in folder.rglob("*.png") if path.is_file())
    assert found[-1] == "missing.jpg"


def test_names_that_are_no_text(model: str, pictures: list[Path], tmp_path: Path) -> None:
    odd = os.path.join(os.fsencode(tmp_path), b"caf\xe9.png")
    with open(odd, "wb") as file:
        file.write(pictures[1].read_bytes())
    for name in ("a.csv", "a.jsonl", "a.parquet"):
        assert predict(model, [os.fsdecode(odd)], str(tmp_path / name)) == 0
        assert read(tmp_path / name)[0]["path"].endswith(r"caf\xe9.png")


def test_what_cannot_be_done_is_said_before_anything_is_written(
    model: str, pictures: list[Path], tmp_path: Path
) -> None:
    vitrail.save(tiny(classes=0), tmp_path / "features")
    (tmp_path / "empty").mkdir()
    for given, message in (
        (
            (model, pictures, str(tmp_path / "answers.xlsx")),
            "its ending is '.xlsx'; .*expected one of: .csv, ",
        ),
        ((model, pictures, str(tmp_path)), "is a folder; give the name of a file, such as .*answers.csv"),
        ((model, [], str(tmp_path / "answers.csv")), "nothing to predict"),
        ((model, [tmp_path / "empty"], str(tmp_path / "answers.csv")), "holds no pictures"),
        (
            (str(tmp_path / "features"), pictures, str(tmp_path / "answers.csv")),
            "gives features, not classes",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            predict(*given)
    assert not list(tmp_path.glob("answers*"))


def torchrun(script: Path, *arguments: object) -> list[Any]:
    """What each of two processes prints, as JSON."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    run = subprocess.run(
        [sys.executable, *command, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_two_processes_write_each_picture_once(model: str, pictures: list[Path], tmp_path: Path) -> None:
    script, out = tmp_path / "two.py", tmp_path / "answers.jsonl"
    script.write_text(
        "import sys; from vitrail.learn.predict import predict\n"
        "model, out, *pictures = sys.argv[1:]\n"
        "sys.stdout.write(f'{predict(model, pictures, out, top=3, batch=2)}\\n')"
    )
    assert torchrun(script, model, out, *pictures) == [len(BAD), len(BAD)]
    check(read(out), model, pictures)


def test_two_processes_judge_each_picture_once(model: str, pictures: list[Path], tmp_path: Path) -> None:
    place = tmp_path / "photos"
    for number, path in enumerate(pictures[1:10]):
        target = place / LABELS[number % 2] / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            target.write_bytes(path.read_bytes())
    script = tmp_path / "two.py"
    script.write_text(
        "import json, sys; from vitrail.learn.evaluate import evaluate\n"
        "figures = evaluate(*sys.argv[1:], batch=2)\n"
        "sys.stdout.write(json.dumps(figures and figures.to_dict()) + '\\n')"
    )
    (two,) = filter(None, torchrun(script, model, place))
    alone = evaluate(model, str(place))
    assert alone is not None
    assert two["confusion"] == alone.confusion.tolist()
    assert two["loss"] == pytest.approx(alone.loss, rel=1e-5)
    assert two["bad"] == alone.bad
    assert len(two["bad"]) == 2


def test_half_precision_weights(model: str, pictures: list[Path], tmp_path: Path) -> None:
    half = vitrail.load(model).bfloat16()
    vitrail.save(half, tmp_path / "half")
    assert predict(str(tmp_path / "half"), [pictures[1]], str(tmp_path / "a.jsonl")) == 0
    exact = half.float()  # bfloat16 as it was rounded, computed in float32
    chances = exact(exact.preprocess(pictures[1])[None]).softmax(-1)
    (row,) = read(tmp_path / "a.jsonl")
    assert row["confidence"] == pytest.approx(chances.max().item(), abs=1e-5)


def test_an_answer_that_is_no_number_is_an_error(model: str, pictures: list[Path], tmp_path: Path) -> None:
    net = vitrail.load(model)
    torch.nn.init.constant_(net.head.bias, torch.nan)
    vitrail.save(net, tmp_path / "spoiled")
    assert predict(str(tmp_path / "spoiled"), pictures[1:3], str(tmp_path / "a.jsonl")) == 2
    assert all("no number" in row["error"] and row["top"] == [] for row in read(tmp_path / "a.jsonl"))
