"""How good a model is: figures from its answers on labelled pictures, with what chance alone would allow."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.batches import Loader
from vitrail.data.sources import Pictures
from vitrail.learn.processes import Processes, gathered
from vitrail.learn.progress import followed

Z = 1.959964  # standard deviations to each side that hold 95 % of a normal distribution
BINS = 15  # of confidence, as Guo et al. (2017) have them
SHOWN = 12  # mistakes and hits that are kept for showing
LISTED = 30  # classes in the table for the terminal


class Rate(NamedTuple):
    """Something that was counted: so many of so many."""

    hits: int
    of: int

    @property
    def share(self) -> float:
        """NaN of nothing."""
        return self.hits / self.of if self.of else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """Where the true share lies, 95 % of the time (Wilson 1927); from 0 to 1 for nothing counted."""
        if not self.of:
            return 0.0, 1.0
        share, weight = self.share, Z**2 / self.of
        centre = (share + weight / 2) / (1 + weight)
        half = math.sqrt(share * (1 - share) * weight + weight**2 / 4) / (1 + weight)
        return max(centre - half, 0.0), min(centre + half, 1.0)

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        low, high = self.interval
        share = self.share if self.of else None
        return {"share": share, "low": low, "high": high, "hits": self.hits, "of": self.of}

    def __str__(self) -> str:
        if not self.of:
            return "–"
        low, high = self.interval
        return f"{self.share:.1%} ({100 * low:.1f}–{100 * high:.1f})"


class OfClass(NamedTuple):
    """A class: how much of it is found, and how much of what is given its name is right.

    The accuracy within a class is its recall.
    """

    name: str
    recall: Rate
    precision: Rate

    @property
    def f1(self) -> float:
        """2 hits / (pictures of the class + answers that name it); NaN where there are neither."""
        both = self.recall.of + self.precision.of
        return 2 * self.recall.hits / both if both else math.nan


class Bin(NamedTuple):
    """Answers whose confidence is in (low, high]: how sure they are on average, and how many are right."""

    low: float
    high: float
    confidence: float
    right: Rate


class Case(NamedTuple):
    """One picture and its answer."""

    picture: int  # its number
    name: str
    truth: str
    answer: str
    confidence: float
    of_truth: float  # the chance that the true class was given


@dataclass(frozen=True)
class Figures:
    """What a model is worth on some pictures.

    of: what these pictures are, for a person, such as "test of photos".
    confusion: (classes, classes), how many pictures of the row's class were taken for the column's.
    mistakes: the surest wrong answers, surest first. hits: the surest right answer of each class.
    bad: name of a picture that could not be read → why; these count for nothing.
    """

    of: str
    classes: tuple[str, ...]
    loss: float  # cross-entropy
    top1: Rate
    top5: Rate  # of fewer than six classes, all
    of_class: tuple[OfClass, ...]
    confusion: Tensor
    bins: tuple[Bin, ...]
    mistakes: tuple[Case, ...]
    hits: tuple[Case, ...]
    bad: dict[str, str]

    @property
    def balanced(self) -> float:
        """The mean recall of the classes that have pictures, so that rare ones count as much as others."""
        shares = [each.recall.share for each in self.of_class if each.recall.of]
        return sum(shares) / len(shares)

    @property
    def ece(self) -> float:
        """Expected calibration error: how far confidence is from the share that is right, on average."""
        return sum(bin.right.of * abs(bin.confidence - bin.right.share) for bin in self.bins) / self.top1.of

    def to_dict(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        return {
            "of": self.of,
            "pictures": self.top1.of,
            "loss": self.loss,
            "top1": self.top1.to_dict(),
            "top5": self.top5.to_dict(),
            "balanced": self.balanced,
            "ece": self.ece,
            "classes": {
                each.name: {
                    "recall": each.recall.to_dict(),
                    "precision": each.precision.to_dict(),
                    "f1": None if math.isnan(each.f1) else each.f1,
                }
                for each in self.of_class
            },
            "confusion": self.confusion.tolist(),
            "calibration": [bin._asdict() | {"right": bin.right.to_dict()} for bin in self.bins],
            "mistakes": [case._asdict() for case in self.mistakes],
            "hits": [case._asdict() for case in self.hits],
            "bad": self.bad,
        }


class Answers(NamedTuple):
    """What a model gave for each picture that can be read, in their order, from all processes."""

    outputs: Tensor  # (pictures, classes or width), float32
    index: Tensor  # type: ignore[assignment]  # (pictures,); hides the method of tuples
    bad: dict[int, str]  # number of a picture that cannot be read → why


@torch.inference_mode()
def answers(model: Callable[[Tensor], Tensor], loader: Loader, here: Processes) -> Answers:
    """A model's logits, or what else it gives for images, of all pictures of a loader without `train`."""
    batches = followed(loader, "picture")
    # Clones: a view, as of a class token, would keep all that it is a view of.
    parts = [
        (model(batch.images).float().cpu().clone(), batch.index.clone())
        for batch in batches
        if len(batch.index)
    ]
    everyone = gathered((parts, loader.bad), here)
    answered = [part for parts, _ in everyone for part in parts]
    bad = {index: why for _, of_process in everyone for index, why in of_process.items()}
    if not answered:
        raise ValueError(f"none of {len(loader.store.pictures):,} pictures can be read: {min(bad.values())}")
    outputs, index = (torch.cat(column) for column in zip(*answered, strict=True))
    return Answers(outputs, index, bad)


def measure(answers: Answers, pictures: Pictures, of: str) -> Figures:
    """Figures from the logits of pictures whose labels are known, which a person calls `of`."""
    logits = answers.outputs.double()  # (pictures, classes)
    labels = pictures.labels[answers.index]
    if logits.isnan().any():
        raise ValueError(
            f"for {int(logits.isnan().any(1).sum()):,} of {len(logits):,} pictures the model answers with no "
            "number; its weights are damaged, or its training went wrong"
        )
    best = logits.topk(min(5, logits.shape[1])).indices
    said = best[:, 0]
    right = said == labels
    chances = logits.softmax(1)
    confidence = chances.max(1).values
    count = len(pictures.classes)
    confusion = torch.bincount(labels * count + said, minlength=count**2).view(count, count)

    def counted(flags: Tensor) -> Rate:
        return Rate(int(flags.sum()), len(flags))

    def case(row: int) -> Case:
        index, label = int(answers.index[row]), int(labels[row])
        return Case(
            index,
            pictures.names[index],
            pictures.classes[label],
            pictures.classes[int(said[row])],
            float(confidence[row]),
            float(chances[row, label]),
        )

    in_bin = (confidence * BINS).ceil().long() - 1
    order = confidence.argsort(descending=True, stable=True)
    wrong = order[~right[order]]
    surest: dict[int, int] = {}  # class → row
    for row in order[right[order]].tolist():
        surest.setdefault(int(labels[row]), row)
    rows, columns = confusion.sum(1).tolist(), confusion.sum(0).tolist()
    return Figures(
        of=of,
        classes=pictures.classes,
        loss=float(F.cross_entropy(logits, labels)),
        top1=counted(right),
        top5=counted((best == labels[:, None]).any(1)),
        of_class=tuple(
            OfClass(name, Rate(hits, of), Rate(hits, said_so))
            for name, hits, of, said_so in zip(
                pictures.classes, confusion.diag().tolist(), rows, columns, strict=True
            )
        ),
        confusion=confusion,
        bins=tuple(
            Bin(number / BINS, (number + 1) / BINS, float(confidence[inside].mean()), counted(right[inside]))
            for number in range(BINS)
            if (inside := in_bin == number).any()
        ),
        mistakes=tuple(map(case, wrong[:SHOWN].tolist())),
        hits=tuple(map(case, list(surest.values())[:SHOWN])),
        bad={pictures.names[index]: why for index, why in answers.bad.items()},
    )


def confusions(figures: Figures) -> list[tuple[int, str, str]]:
    """(how often, true class, answer) of all mistakes, most frequent first."""
    wrong = figures.confusion - figures.confusion.diag().diag()
    found = [(int(wrong[row, column]), row, column) for row, column in wrong.nonzero().tolist()]
    found.sort(key=lambda each: -each[0])
    return [(count, figures.classes[row], figures.classes[column]) for count, row, column in found]


def table(figures: Figures) -> str:
    """The figures for a terminal; of many classes, those that are found least."""
    lines = [
        f"pictures   {figures.top1.of:,}, {figures.of}"
        + (f", and {len(figures.bad):,} that cannot be read" if figures.bad else ""),
        f"top-1      {figures.top1}",
        *([f"top-5      {figures.top5}"] if len(figures.classes) > 5 else []),
        f"balanced   {figures.balanced:.1%}, the mean over classes",
        f"loss       {figures.loss:.4f}",
        f"ECE        {figures.ece:.1%}, how far confidence is from the share that is right",
        "",
    ]
    shown: Sequence[OfClass] = figures.of_class
    if len(shown) > LISTED:
        known = [each for each in shown if each.recall.of]
        shown = sorted(known, key=lambda each: each.recall.share)[:LISTED]
        lines.append(f"The {len(shown)} of {len(figures.classes)} classes that are found least:")
    width = max(len("class"), *(len(each.name) for each in shown))
    lines.append(
        f"{'class':<{width}}{'pictures':>10}   {'found (recall)':<21}{'right (precision)':<21}{'F1':>5}"
    )
    for each in shown:
        f1 = "–" if math.isnan(each.f1) else f"{each.f1:.2f}"
        lines.append(
            f"{each.name:<{width}}{each.recall.of:>10,}   {each.recall!s:<21}{each.precision!s:<21}{f1:>5}"
        )
    often = confusions(figures)[:5]
    if often:
        lines += ["", "Most often taken for another:"]
        lines += [f"{count:>6} of {truth} for {answer}" for count, truth, answer in often]
    lines += [f"cannot be read: {name}: {why}" for name, why in figures.bad.items()]
    return "\n".join(lines)
