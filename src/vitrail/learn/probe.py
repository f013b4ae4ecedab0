"""What a model's features are worth on pictures it was not trained on: nearest neighbours, a linear probe.

The model stays as it is. Each picture goes through it once; k and the strength of the penalty are chosen
on a part of the training pictures, and only then are the others looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.checks import refuse_one_class
from vitrail.data.sources import complete
from vitrail.learn.evaluate import once
from vitrail.learn.measure import Figures, answers, measure
from vitrail.learn.processes import processes
from vitrail.learn.splits import opened
from vitrail.weights import load

HELD = "held"  # the part of the training pictures that settings are chosen on
KS = (1, 3, 5, 10, 20, 50, 100)
TEMPERATURE = 0.07  # of a neighbour's vote, exp(similarity / temperature), as Wu et al. (2018) have it
PENALTIES = tuple(10**exponent for exponent in (0.0, -0.5, -1.0, -1.5, -2.0, -2.5, -3.0, -4.0, -5.0))
STEPS = 300  # of L-BFGS at most
DOUBT = 1e-3  # what is added to each class's share of the votes: none is ruled out
ROOM = 2**26  # similarities between pictures that are held in one go


Classifier: TypeAlias = Callable[[Tensor], Tensor]  # (pictures, width) → logits (pictures, classes)


class Probe(NamedTuple):
    """What was chosen, and how good it is: method → split → figures."""

    width: int
    k: int
    penalty: float
    figures: dict[str, dict[str, Figures]]

    def to_dict(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        figures = {
            method: {split: each.to_dict() for split, each in of_split.items()}
            for method, of_split in self.figures.items()
        }
        return {**self._asdict(), "figures": figures}

    def __str__(self) -> str:
        chosen = {"neighbours": f"k={self.k}", "linear": f"penalty={self.penalty:.2g}"}
        lines = [f"{self.width} features of each picture; settings were chosen on a part of train"]
        lines += [
            f"{method:<12}{split:<6}top-1 {figures.top1}   balanced {figures.balanced:.1%}   {chosen[method]}"
            for method, of_split in self.figures.items()
            for split, figures in of_split.items()
        ]
        return "\n".join(lines)


def probe(
    source: str,
    place: str,
    *,
    batch: int = 64,
    workers: int | None = None,
    device: str = "auto",
    seed: int = 0,
) -> Probe | None:
    """The worth of a model's features on labelled pictures; None in all processes but the first.

    source: a run folder, or anything that vitrail.load reads. place: pictures as open_source knows them;
    a fifth of them is kept apart as test where there is neither val nor test, neither in the place nor in
    the run that the model comes from. batch: pictures at a time in each process. device: as processes
    takes it.
    """
    dataset, _ = opened(source, place)
    refuse_one_class(dataset.classes)
    shares = {HELD: 0.2} if {"val", "test"} & dataset.splits.keys() else {HELD: 0.2, "test": 0.2}
    splits = complete(dataset, seed=seed, shares=shares).splits
    judged: list[str] = [split for split in ("val", "test") if split in splits]
    with processes(device) as here:
        model: Any = load(source, dtype=torch.float32).to(here.device)
        given = {
            split: answers(model.features, once(pictures, model, here, batch=batch, workers=workers), here)
            for split, pictures in splits.items()
        }
    if not here.first:
        return None
    features = {split: each.outputs.double() for split, each in given.items()}
    labels = {split: splits[split].labels[each.index] for split, each in given.items()}

    def right(logits: Tensor) -> float:
        return float((logits.argmax(1) == labels[HELD]).double().mean())

    count = len(dataset.classes)
    ks = [k for k in KS if k <= len(labels["train"])]
    votes = neighbours(features["train"], labels["train"], features[HELD], count, ks)
    k = max(ks, key=lambda k: right(votes[k]))
    tried = dict(linear(features["train"], labels["train"], count, PENALTIES))
    penalty = max(tried, key=lambda penalty: right(tried[penalty](features[HELD])))

    known = torch.cat([features["train"], features[HELD]])
    named = torch.cat([labels["train"], labels[HELD]])
    *_, (_, classifier) = linear(known, named, count, [p for p in PENALTIES if p >= penalty])
    methods: dict[str, Classifier] = {
        "neighbours": lambda rows: neighbours(known, named, rows, count, [k])[k],
        "linear": classifier,
    }
    figures = {
        method: {
            split: measure(
                given[split]._replace(outputs=answer(features[split])), splits[split], f"{split} of {place}"
            )
            for split in judged
        }
        for method, answer in methods.items()
    }
    return Probe(known.shape[1], k, penalty, figures)


def neighbours(
    known: Tensor, labels: Tensor, asked: Tensor, classes: int, ks: Iterable[int]
) -> dict[int, Tensor]:
    """k → logits (asked, classes) by the votes of the k most similar of the known pictures.

    known, asked: features (pictures, width), compared by their cosine. labels: of the known.
    """
    ks = list(ks)
    known, asked = F.normalize(known), F.normalize(asked)
    parts: dict[int, list[Tensor]] = {k: [] for k in ks}
    for rows in asked.split(max(1, ROOM // len(known))):
        similarity, nearest = (rows @ known.T).topk(max(ks))  # (rows, k)
        votes = (similarity / TEMPERATURE).exp()
        for k in ks:
            counted = votes.new_zeros(len(rows), classes)
            counted.scatter_add_(1, labels[nearest[:, :k]], votes[:, :k])
            parts[k].append((F.normalize(counted, p=1) + DOUBT).log())
    return {k: torch.cat(part) for k, part in parts.items()}


def linear(
    features: Tensor, labels: Tensor, classes: int, penalties: Iterable[float]
) -> Iterator[tuple[float, Classifier]]:
    """For each penalty, the strongest first, the logistic regression that is best with it.

    It minimises the mean cross-entropy + penalty / 2 · |weight|², of features (pictures, width) that are
    scaled to mean 0 and deviation 1; the classifier that comes out takes them as they were.
    """
    deviation, mean = torch.std_mean(features, 0, correction=0)
    deviation = torch.where(deviation > 0, deviation, 1.0)
    scaled = (features - mean) / deviation
    weight = scaled.new_zeros(classes, scaled.shape[1], requires_grad=True)
    bias = scaled.new_zeros(classes, requires_grad=True)
    for penalty in penalties:
        optimiser = torch.optim.LBFGS(
            [weight, bias],
            max_iter=STEPS,
            history_size=20,
            tolerance_grad=1e-7,
            tolerance_change=1e-12,
            line_search_fn="strong_wolfe",
        )

        def loss(optimiser: torch.optim.LBFGS = optimiser, penalty: float = penalty) -> Tensor:
            optimiser.zero_grad()
            value = F.cross_entropy(scaled @ weight.T + bias, labels) + penalty / 2 * weight.square().sum()
            value.backward()
            return value

        optimiser.step(loss)
        with torch.no_grad():
            plain = weight / deviation
            yield penalty, partial(F.linear, weight=plain, bias=bias - plain @ mean)
