"""Figures against scikit-learn, torchmetrics and scipy, and by hand where a formula is all there is."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from sklearn import metrics
from torch import Tensor

from judges import declare_torchvision_operators
from tiny import tiny
from vitrail import save
from vitrail.data.batches import Loader, Store
from vitrail.data.sources import Pictures, from_files, open_source
from vitrail.learn.evaluate import evaluate
from vitrail.learn.measure import BINS, Answers, Figures, Rate, answers, confusions, measure, table
from vitrail.learn.processes import Processes
from vitrail.learn.train import train

ALONE = Processes(0, 1, torch.device("cpu"))


def labelled(labels: Tensor, classes: int) -> Pictures:
    names = [f"{number}.jpg" for number in range(len(labels))]
    return Pictures(names, names, labels, tuple(f"kind {c}" for c in range(classes)), lambda item: item)


def figures_of(logits: Tensor, labels: Tensor) -> Figures:
    given = Answers(logits, torch.arange(len(labels)), {})
    return measure(given, labelled(labels, logits.shape[1]), "test of nothing")


@pytest.fixture(params=[2, 7, 30])
def example(request: pytest.FixtureRequest) -> tuple[Tensor, Tensor, Figures]:
    """Logits and labels of 400 pictures, right about half of the time, of uneven classes."""
    classes = request.param
    labels = (torch.rand(400).square() * classes).long()
    logits = torch.randn(400, classes) * 1.5
    logits[torch.arange(400), labels] += 1.5
    return logits, labels, figures_of(logits, labels)


def test_shares_of_right_answers(example: tuple[Tensor, Tensor, Figures]) -> None:
    logits, labels, figures = example
    classes = logits.shape[1]
    expected = metrics.accuracy_score(labels, logits.argmax(1))
    assert figures.top1.share == pytest.approx(expected)
    assert figures.loss == pytest.approx(
        metrics.log_loss(labels, logits.double().softmax(1), labels=range(classes))
    )
    assert figures.balanced == pytest.approx(metrics.balanced_accuracy_score(labels, logits.argmax(1)))
    if classes > 5:
        top5 = metrics.top_k_accuracy_score(labels, logits, k=5, labels=range(classes))
        assert figures.top5.share == pytest.approx(top5)


def test_each_class(example: tuple[Tensor, Tensor, Figures]) -> None:
    logits, labels, figures = example
    judged = metrics.classification_report(
        labels,
        logits.argmax(1),
        labels=range(logits.shape[1]),
        target_names=figures.classes,
        output_dict=True,
        zero_division=np.nan,
    )
    for each in figures.of_class:
        theirs = judged[each.name]
        assert each.recall.of == theirs["support"]
        ours = [each.precision.share, each.recall.share, each.f1]
        assert ours == pytest.approx([theirs[k] for k in ("precision", "recall", "f1-score")], nan_ok=True)


def test_confusion(example: tuple[Tensor, Tensor, Figures]) -> None:
    logits, labels, figures = example
    theirs = metrics.confusion_matrix(labels, logits.argmax(1), labels=range(logits.shape[1]))
    assert np.array_equal(figures.confusion.numpy(), theirs)
    found = confusions(figures)
    assert sum(count for count, _, _ in found) == len(labels) - figures.top1.hits
    assert [count for count, _, _ in found] == sorted((count for count, _, _ in found), reverse=True)
    count, truth, answer = found[0]
    assert theirs[figures.classes.index(truth), figures.classes.index(answer)] == count


def test_calibration(example: tuple[Tensor, Tensor, Figures]) -> None:
    declare_torchvision_operators()  # torchmetrics imports torchvision
    from torchmetrics.functional.classification import multiclass_calibration_error

    logits, labels, figures = example
    theirs = multiclass_calibration_error(logits.double().softmax(1), labels, logits.shape[1], n_bins=BINS)
    assert figures.ece == pytest.approx(theirs.item(), abs=1e-6)
    assert sum(bin.right.of for bin in figures.bins) == len(labels)
    assert all(bin.low < bin.confidence <= bin.high for bin in figures.bins)


@pytest.mark.parametrize(("hits", "of"), [(0, 1), (1, 1), (0, 50), (7, 10), (912, 1000), (50, 50)])
def test_wilson_interval(hits: int, of: int) -> None:
    theirs = binomtest(hits, of).proportion_ci(0.95, method="wilson")
    assert Rate(hits, of).interval == pytest.approx((theirs.low, theirs.high), abs=1e-6)


def test_nothing_counted_tells_nothing() -> None:
    nothing = Rate(0, 0)
    assert math.isnan(nothing.share)
    assert nothing.interval == (0, 1)
    assert str(nothing) == "–"
    assert nothing.to_dict()["share"] is None
    assert str(Rate(9, 10)) == "90.0% (59.6–98.2)"


def test_mistakes_and_hits(example: tuple[Tensor, Tensor, Figures]) -> None:
    logits, labels, figures = example
    chances = logits.double().softmax(1)
    said = logits.argmax(1)
    wrong = [i for i in np.argsort(-chances.max(1).values.numpy()) if said[i] != labels[i]]
    assert [case.picture for case in figures.mistakes] == wrong[: len(figures.mistakes)]
    for case in (*figures.mistakes, *figures.hits):
        assert case.name == f"{case.picture}.jpg"
        assert case.confidence == pytest.approx(chances[case.picture].max().item())
        assert case.of_truth == pytest.approx(chances[case.picture, labels[case.picture]].item())
        assert case.answer == figures.classes[said[case.picture]]
        assert case.truth == figures.classes[labels[case.picture]]
    assert all(case.truth == case.answer for case in figures.hits)
    assert len({case.truth for case in figures.hits}) == len(figures.hits)


def test_one_answer_for_all_is_no_more_than_that() -> None:
    """Equal logits must not count as right for whatever the label is."""
    figures = figures_of(torch.zeros(100, 10), torch.arange(100) % 10)
    assert figures.top1.hits == 10
    assert figures.top5.hits == 50
    assert figures.ece == pytest.approx(0)


def test_answers_that_are_no_numbers_are_refused() -> None:
    logits = torch.zeros(4, 3)
    logits[1, 2] = math.nan
    with pytest.raises(ValueError, match="for 1 of 4 pictures the model answers with no number"):
        figures_of(logits, torch.zeros(4, dtype=torch.long))


def test_the_table_and_json(example: tuple[Tensor, Tensor, Figures]) -> None:
    _, _, figures = example
    text = table(figures)
    assert "pictures   400, test of nothing" in text
    assert f"top-1      {figures.top1}" in text
    assert ("top-5" in text) == (len(figures.classes) > 5)
    assert max(map(len, text.splitlines())) <= 100
    kept = json.loads(json.dumps(figures.to_dict(), allow_nan=False))
    assert kept["top1"]["hits"] == figures.top1.hits
    assert kept["classes"]["kind 1"]["recall"]["of"] == figures.of_class[1].recall.of


def test_many_classes_are_told_by_the_worst() -> None:
    labels = torch.arange(400) % 100
    logits = torch.nn.functional.one_hot(labels, 100).float()
    logits[labels == 42] = 0.0
    lines = table(figures_of(logits, labels)).splitlines()
    first = lines.index("The 30 of 100 classes that are found least:") + 2
    assert lines[first].startswith("kind 42 ")
    assert sum(line.startswith("kind ") for line in lines) == 30


def test_answers_are_in_order_and_know_what_is_bad(tmp_path: Path) -> None:
    from PIL import Image

    paths = [tmp_path / f"{shade}.png" for shade in range(0, 250, 25)]
    for path in paths:
        Image.new("RGB", (40, 32), (int(path.stem), 90, 20)).save(path)
    paths[3].write_text("no picture")
    pictures = from_files(paths)
    model = tiny()
    store = Store(pictures, model.preprocess, exact=True, memory=0)
    found = answers(model, Loader(store, batch=4), ALONE)
    assert found.index.tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert "known format" in found.bad[3]
    with torch.inference_mode():
        one = model(model.preprocess(paths[5])[None])[0]
    assert torch.allclose(found.outputs[4], one, atol=1e-5)
    unreadable = Store(pictures.select(torch.tensor([3])), model.preprocess, exact=True)
    with pytest.raises(ValueError, match="none of 1 pictures can be read"):
        answers(model, Loader(unreadable, batch=1), ALONE)


SMALL = ["model.width=16", "model.heads=2", "model.mlp_width=32", "model.depth=2", "epochs=2"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run on two hundred digits in an .npz."""
    from sklearn.datasets import load_digits

    folder = tmp_path_factory.mktemp("run")
    digits = load_digits()
    pixels = (digits.images * 15).astype(np.uint8)
    np.savez(folder / "few.npz", images=pixels[:200], labels=digits.target[:200])
    train(str(folder / "few.npz"), [*SMALL, "batch=16", "precision=float32"], out=folder / "x")
    return folder / "x"


def test_a_run_is_judged_by_what_it_kept_apart(run: Path) -> None:
    own = evaluate(str(run))
    assert own is not None
    assert own.top1.of == 20
    assert own.of.startswith("test of ")
    place = str(run.parent / "few.npz")
    same = evaluate(str(run), place)
    assert same is not None
    assert same.to_dict() == own.to_dict()
    val = evaluate(str(run), split="val", batch=3)
    assert val is not None
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    best = max((line for line in lines if line["part"] == "val"), key=lambda line: line["accuracy"])
    assert val.top1.share == pytest.approx(best["accuracy"])
    assert val.loss == pytest.approx(best["loss"], rel=1e-4)


def test_a_model_is_judged_by_any_pictures(run: Path, tmp_path: Path) -> None:
    """Those of a single class, too: classes are numbered as the model numbers them."""
    data = np.load(run.parent / "few.npz")
    sevens = data["labels"] == 7
    np.savez(tmp_path / "sevens.npz", images=data["images"][sevens], labels=data["labels"][sevens])
    figures = evaluate(str(run / "last"), str(tmp_path / "sevens.npz"))
    assert figures is not None
    assert figures.classes == tuple("0123456789")
    assert figures.of_class[7].recall.of == figures.top1.of == int(sevens.sum())


def test_pictures_that_changed_since_training_are_refused(run: Path) -> None:
    place = run.parent / "few.npz"
    before = place.read_bytes()
    data = np.load(place)
    try:
        np.savez(place, images=data["images"][:150], labels=data["labels"][:150])
        with pytest.raises(
            ValueError, match=r"does not give the pictures that .* was begun with: train has \d+ "
        ):
            evaluate(str(run))
    finally:
        place.write_bytes(before)


def test_what_cannot_be_judged_says_why(run: Path, tmp_path: Path) -> None:
    place = str(run.parent / "few.npz")
    asked: list[tuple[dict[str, Any], str]] = [
        ({"source": str(run), "split": "tset"}, "unknown split 'tset'; did you mean 'test'"),
        ({"source": str(run), "place": str(tmp_path / "nowhere")}, "does not exist"),
    ]
    save(tiny(), tmp_path / "other")
    asked.append(({"source": str(tmp_path / "other")}, "other has no run with pictures of its own"))
    asked.append(({"source": str(tmp_path / "other"), "place": place}, "unknown class"))
    save(tiny(classes=0), tmp_path / "features")
    asked.append(({"source": str(tmp_path / "features"), "place": place}, "gives features, not classes"))
    for given, message in asked:
        with pytest.raises(ValueError, match=message):
            evaluate(**given)


def test_a_report_that_cannot_be_written_is_refused_before_the_work(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place, why in ((tmp_path, "Is a directory"), (tmp_path / "file" / "r.html", "Not a directory")):
        with pytest.raises(ValueError, match=f"{place} cannot be written: {why}$"):
            evaluate("nowhere", report=place)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "data.json",
            "{",
            r"which pictures .*copy has .* as its data\.json is damaged or gone",
        ),
        (
            "recipe.toml",
            "epochs =",
            r"as its recipe\.toml is damaged: .* no valid TOML: .*",
        ),
        ("recipe.toml", "epoch = 3", r"as its recipe\.toml is damaged: Recipe has no field 'epoch'"),
    ],
)
def test_a_run_with_a_broken_file_says_which(
    run: Path, tmp_path: Path, name: str, text: str, message: str
) -> None:
    shutil.copytree(run, tmp_path / "copy")
    (tmp_path / "copy" / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        evaluate(str(tmp_path / "copy"))


def test_labels_follow_the_model_not_the_folder(run: Path) -> None:
    pictures = open_source(str(run.parent / "few.npz"), classes=tuple("9876543210")).splits["train"]
    assert pictures.classes[int(pictures.labels[0])] == str(np.load(run.parent / "few.npz")["labels"][0])
