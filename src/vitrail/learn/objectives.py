"""Objectives: from a model and a batch to a loss and figures. The loop knows nothing else of either."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.models import Model


class Lesson(NamedTuple):
    """A loss to go down from, and figures to tell, each a mean over the batch."""

    loss: Tensor
    figures: dict[str, Tensor]


# A batch is any named tuple of tensors whose first dimension is the sample; `images` and `labels` here.
Objective: TypeAlias = Callable[[nn.Module, Any], Lesson]


class Mixed(NamedTuple):
    """A batch in which every picture is blended with its partner's, as Mixup and CutMix leave it."""

    images: Tensor  # (batch, channels, height, width)
    labels: Tensor  # (batch,)
    others: Tensor  # (batch,) the partners' labels
    share: Tensor  # (batch,) how much of the picture is its own, float32


def mix_pairs(
    batch: Any,
    seed: int,
    *,
    mixup: float = 0.0,
    cutmix: float = 0.0,
    rank: int = 0,
    world: int = 1,
) -> Mixed:
    """Blends each pair (2k, 2k+1) of the global batch, of which `batch` is the part of one process.

    mixup, cutmix: the α of Beta(α, α), from which a pair draws its share; 0 for none. With both, half
    of the pairs blend all pixels (Zhang et al. 2018) and half swap a rectangle (Yun et al. 2019).
    """
    here = len(batch.images) // 2
    draw = np.random.default_rng(seed)
    pairs = here * world
    cuts = draw.random(pairs) < (0.5 if mixup and cutmix else float(cutmix > 0))
    shares = np.where(cuts, *(draw.beta(a, a, pairs) if a else np.ones(pairs) for a in (cutmix, mixup)))
    centres = draw.random((pairs, 2))
    mine = slice(rank * here, (rank + 1) * here)
    cuts, shares, centres = cuts[mine], shares[mine], centres[mine]

    images = batch.images.clone()
    height, width = images.shape[-2:]
    partner = torch.arange(len(images)).view(-1, 2).flip(1).flatten()  # 1 0 3 2 …
    for pair in np.flatnonzero(cuts):
        both = slice(2 * pair, 2 * pair + 2)
        # a rectangle of the picture's own shape, cut off at the edges
        half = np.array([height, width]) * np.sqrt(1 - shares[pair]) / 2
        middle = centres[pair] * (height, width)
        (top, left), (bottom, right) = (
            np.rint(edge).clip(0, (height, width)).astype(int) for edge in (middle - half, middle + half)
        )
        images[both, :, top:bottom, left:right] = batch.images[both, :, top:bottom, left:right].flip(0)
        shares[pair] = 1 - (bottom - top) * (right - left) / (height * width)
    share = torch.from_numpy(shares).float().repeat_interleave(2).to(images.device)
    blended = torch.from_numpy(~cuts & (shares < 1)).repeat_interleave(2).to(images.device)
    if blended.any():
        own = share[blended][:, None, None, None]
        images[blended] = batch.images[blended] * own + batch.images[partner][blended] * (1 - own)
    return Mixed(images, batch.labels, batch.labels[partner], share)


def cross_entropy(logits: Tensor, batch: Any, smoothing: float) -> Tensor:
    """Against a batch's labels, and its partners' where it is mixed; in float32, the mean over the batch."""
    against = partial(F.cross_entropy, logits.float(), reduction="none", label_smoothing=smoothing)
    own = against(batch.labels)
    if not isinstance(batch, Mixed):
        return own.mean()
    return (own * batch.share + against(batch.others) * (1 - batch.share)).mean()


def _accuracy(logits: Tensor, batch: Any) -> dict[str, Tensor]:
    """Against the label that a picture shows most of."""
    labels = batch.labels
    if isinstance(batch, Mixed):
        labels = torch.where(batch.share >= 0.5, labels, batch.others)
    return {"accuracy": (logits.detach().argmax(-1) == labels).float().mean()}


def classify(*, smoothing: float = 0.0) -> Objective:
    """Cross-entropy, of which `smoothing` is spread over all classes (not while evaluating)."""

    def objective(model: nn.Module, batch: Any) -> Lesson:
        logits = model(batch.images)  # (batch, classes)
        loss = cross_entropy(logits, batch, smoothing if model.training else 0.0)
        return Lesson(loss, _accuracy(logits, batch))

    return objective


def distil(
    teacher: Model, *, hard: bool, weight: float = 0.5, temperature: float = 1.0, smoothing: float = 0.0
) -> Objective:
    """DeiT's: the class token learns from the labels, the distillation token from a teacher.

    hard: from the class that the teacher finds likeliest; otherwise, soft, from all its chances at a
    temperature (Hinton et al. 2015). weight: of the teacher's share. A student of one token learns
    from both with the same logits. Evaluated as `classify`.
    """
    teacher.eval().requires_grad_(False)
    plain = classify()

    def objective(model: Any, batch: Any) -> Lesson:
        if not model.training:
            return plain(model, batch)
        with torch.no_grad():
            told = teacher(as_seen_by(teacher, model, batch.images)).float()  # (batch, classes)
        if hasattr(model, "distillation_head"):
            logits, distilled = model.both_logits(batch.images)
        else:
            logits = distilled = model(batch.images)
        if hard:
            copied = F.cross_entropy(distilled.float(), told.argmax(-1))
        else:
            ours, theirs = ((each.float() / temperature).log_softmax(-1) for each in (distilled, told))
            copied = F.kl_div(ours, theirs, reduction="batchmean", log_target=True) * temperature**2
        loss = (1 - weight) * cross_entropy(logits, batch, smoothing) + weight * copied
        return Lesson(loss, _accuracy((logits + distilled) / 2, batch))

    return objective


def as_seen_by(teacher: Model, student: Model, images: Tensor) -> Tensor:
    """The student's input (batch, channels, height, width) as the teacher's preprocessing would have it."""
    theirs, ours = teacher.preprocess, student.preprocess
    if (theirs.mean, theirs.std) != (ours.mean, ours.std):
        columns = torch.tensor([ours.mean, ours.std]), torch.tensor([theirs.mean, theirs.std])
        (mean, std), (new_mean, new_std) = (
            both.to(images)[:, :, None, None] for both in columns
        )  # each (channels, 1, 1)
        images = (images * std + mean - new_mean) / new_std  # one channel becomes three if theirs are
    if images.shape[-2:] != theirs.size:
        images = F.interpolate(images, theirs.size, mode="bicubic", antialias=True)
    return images


def _distil_by_recipe(recipe: Any, teacher: Any, *, hard: bool) -> Objective:
    return distil(
        teacher,
        hard=hard,
        weight=recipe.teacher_weight,
        temperature=recipe.temperature,
        smoothing=recipe.smoothing,
    )


# What `objective` in a recipe names → what is made of the recipe's settings and the teacher.
OBJECTIVES: dict[str, Callable[[Any, Model | None], Objective]] = {
    "classify": lambda recipe, _: classify(smoothing=recipe.smoothing),
    "distil-hard": partial(_distil_by_recipe, hard=True),
    "distil-soft": partial(_distil_by_recipe, hard=False),
}
