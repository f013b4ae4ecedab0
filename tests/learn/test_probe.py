"""Neighbours and linear classifiers against scikit-learn's; the whole on digits."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor

import vitrail
from compare import distance
from tiny import tiny
from vitrail.learn.probe import PENALTIES, TEMPERATURE, linear, neighbours, probe


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor, Tensor]:
    """Features (300, 64), their labels, and the features of others (100, 64)."""
    found = load_digits()
    features = torch.tensor(found.data, dtype=torch.float64)
    return features[:300], torch.tensor(found.target[:300]), features[300:400]


@pytest.mark.parametrize("k", [1, 5, 20])
def test_neighbours_as_scikit_learn_has_them(digits: tuple[Tensor, Tensor, Tensor], k: int) -> None:
    known, labels, asked = digits
    judge = KNeighborsClassifier(
        k,
        metric="cosine",
        algorithm="brute",
        weights=lambda distances: np.exp((1 - distances) / TEMPERATURE),
    ).fit(known, labels)
    ours = neighbours(known, labels, asked, 10, {1, k, 50})[k].exp()
    theirs = torch.tensor(judge.predict_proba(asked)) + 1e-3
    assert distance(ours, theirs) < 1e-9


def test_linear_as_scikit_learn_has_it(digits: tuple[Tensor, Tensor, Tensor]) -> None:
    known, labels, asked = digits
    deviation = known.std(0, correction=0)
    scale = torch.where(deviation > 0, deviation, 1.0)
    for penalty, ours in linear(known, labels, 10, PENALTIES[:7:2]):
        judge = LogisticRegression(C=1 / (penalty * len(known)), tol=1e-10, max_iter=20_000)
        judge.fit((known - known.mean(0)) / scale, labels)
        theirs = torch.tensor(judge.predict_proba((asked - known.mean(0)) / scale))
        assert distance(ours(asked).softmax(1), theirs) < 1e-4


def test_a_feature_that_never_changes_does_no_harm(digits: tuple[Tensor, Tensor, Tensor]) -> None:
    known, labels, asked = digits
    constant = (torch.cat([x, torch.full((len(x), 1), 7.0).double()], 1) for x in (known, asked))
    more, asked_more = constant
    ((_, plain),) = linear(known, labels, 10, [0.1])
    ((_, other),) = linear(more, labels, 10, [0.1])
    assert distance(other(asked_more), plain(asked)) < 1e-6


def test_too_little_to_probe_with(tmp_path: Path) -> None:
    for labels, message in (([3, 3, 3, 3], "only one class, 3; expected two"), ([0, 1], "too few to keep")):
        np.savez(tmp_path / "few.npz", images=np.zeros((len(labels), 8, 8), np.uint8), labels=labels)
        with pytest.raises(ValueError, match=message):
            probe("nowhere", str(tmp_path / "few.npz"))


def test_the_whole(tmp_path: Path) -> None:
    """Random features of digits are worth something; test pictures decide nothing."""
    found = load_digits()
    pixels = (found.images * 15).astype(np.uint8)
    place = tmp_path / "digits.npz"
    np.savez(place, images=pixels[:600], labels=found.target[:600])
    vitrail.save(tiny(image_size=(16, 16)), tmp_path / "model")
    result = probe(str(tmp_path / "model"), str(place), batch=100)
    assert result is not None
    assert result.width == 48
    assert {method: list(of_split) for method, of_split in result.figures.items()} == {
        "neighbours": ["test"],
        "linear": ["test"],
    }
    for of_split in result.figures.values():
        assert of_split["test"].top1.of == 120
        assert of_split["test"].top1.share > 0.5
    text = str(result)
    assert f"k={result.k}" in text
    assert str(result.figures["linear"]["test"].top1) in text
    assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["k"] == result.k
