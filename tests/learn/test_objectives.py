"""Losses against torch and the papers' formulas; mixing against its definition."""

import math
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vitrail
from compare import distance, disturbed
from vitrail.data.preprocess import Preprocess
from vitrail.learn.objectives import Mixed, as_seen_by, classify, distil, mix_pairs


class Batch(NamedTuple):
    images: Tensor
    labels: Tensor
    index: Tensor


def batch(count: int = 8, size: tuple[int, int] = (12, 20)) -> Batch:
    return Batch(torch.rand(count, 3, *size), torch.arange(count) % 5, torch.arange(count))


class Logits(nn.Module):
    """A model that answers with what it is told."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, images: Tensor) -> Tensor:
        return self.logits


def test_classification_with_smoothing_is_the_formula() -> None:
    given, logits = batch(), torch.randn(8, 5)
    targets = F.one_hot(given.labels, 5) * 0.9 + 0.1 / 5
    lesson = classify(smoothing=0.1)(Logits(logits), given)
    assert lesson.loss.item() == pytest.approx(-(targets * logits.log_softmax(-1)).sum(-1).mean().item())
    assert lesson.figures["accuracy"].item() == (logits.argmax(-1) == given.labels).float().mean().item()


def test_evaluation_smooths_nothing() -> None:
    given, logits = batch(), torch.randn(8, 5)
    loss = classify(smoothing=0.1)(Logits(logits).eval(), given).loss
    assert loss.item() == pytest.approx(F.cross_entropy(logits, given.labels).item())


def test_mixed_classification_is_that_of_mixed_targets() -> None:
    given, logits = batch(), torch.randn(8, 5)
    mixed = mix_pairs(given, 0, mixup=1.0)
    one, other = F.one_hot(mixed.labels, 5), F.one_hot(mixed.others, 5)
    targets = one * mixed.share[:, None] + other * (1 - mixed.share[:, None])
    expected = F.cross_entropy(logits, targets, label_smoothing=0.2)
    assert classify(smoothing=0.2)(Logits(logits), mixed).loss.item() == pytest.approx(expected.item())


def test_mixup_blends_pictures_as_it_blends_labels() -> None:
    given = batch()
    mixed = mix_pairs(given, 7, mixup=0.8)
    for k in range(8):
        partner = k ^ 1
        share = mixed.share[k]
        torch.testing.assert_close(
            mixed.images[k], given.images[k] * share + given.images[partner] * (1 - share)
        )
        assert mixed.others[k] == given.labels[partner]
        assert mixed.share[k] == mixed.share[partner]
    assert len(mixed.share.unique()) == 4


def test_cutmix_swaps_one_rectangle_and_counts_its_area() -> None:
    given = batch(64)
    mixed = mix_pairs(given, 3, cutmix=1.0)
    for k in range(64):
        swapped = (mixed.images[k] == given.images[k ^ 1]).all(0)
        assert torch.equal(mixed.images[k][:, ~swapped], given.images[k][:, ~swapped])
        rows, columns = swapped.any(1), swapped.any(0)
        assert torch.equal(swapped, rows[:, None] & columns)
        assert mixed.share[k].item() == pytest.approx(1 - swapped.float().mean().item(), abs=1e-6)
    # E[share] of uniform shares is 1/2, but rectangles are cut off at the edges
    assert 0.5 < mixed.share.mean() < 0.75


def test_with_both_each_pair_has_one() -> None:
    given = batch(400)
    mixed = mix_pairs(given, 5, mixup=1.0, cutmix=1.0)
    own = (mixed.images == given.images).all(1)
    cut = (own | (mixed.images == given.images[torch.arange(400) ^ 1]).all(1)).flatten(1).all(1)
    assert 0.4 < cut.float().mean() < 0.6


def test_shares_are_of_the_beta_distribution() -> None:
    given = batch(20_000, (1, 1))
    shares = mix_pairs(given, 11, mixup=0.2).share[::2]
    assert shares.mean().item() == pytest.approx(0.5, abs=0.02)
    assert shares.var().item() == pytest.approx(0.25 / (2 * 0.2 + 1), rel=0.05)


def test_parts_of_a_batch_are_mixed_as_the_whole() -> None:
    given = batch(12)
    whole = mix_pairs(given, 9, mixup=0.2, cutmix=1.0)
    for rank in range(3):
        part = Batch(*(field.chunk(3)[rank] for field in given))
        mixed = mix_pairs(part, 9, mixup=0.2, cutmix=1.0, rank=rank, world=3)
        for ours, theirs in zip(mixed, whole, strict=True):
            assert torch.equal(ours, theirs.chunk(3)[rank])


def test_mixing_leaves_the_batch_as_it_was() -> None:
    given = batch()
    before = given.images.clone()
    assert isinstance(mix_pairs(given, 1, mixup=1.0, cutmix=1.0), Mixed)
    assert torch.equal(given.images, before)


TINY = {"width": 24, "depth": 1, "heads": 3, "mlp_width": 24, "image_size": (12, 20), "classes": 5}


@pytest.mark.parametrize("hard", [True, False])
def test_distillation_is_that_of_the_paper(hard: bool) -> None:
    """DeiT, equations 2 and 3: the halves, and for soft targets τ² KL(teacher ‖ student)."""
    student, teacher = vitrail.create("deit-ti/4", **TINY), vitrail.create("vit-ti/4", **TINY)
    for parameter in [*student.parameters(), *teacher.parameters()]:
        nn.init.normal_(parameter, std=0.3)
    given = batch()
    objective = distil(teacher, hard=hard, weight=0.3, temperature=3.0, smoothing=0.1)
    with torch.no_grad():
        lesson = objective(student.train(), given)
        by_class, by_distillation = student.both_logits(given.images)
        told = teacher(given.images)
    labels = F.cross_entropy(by_class, given.labels, label_smoothing=0.1)
    theirs, ours = (logits / 3.0 for logits in (told, by_distillation))
    divergence = (theirs.softmax(-1) * (theirs.log_softmax(-1) - ours.log_softmax(-1))).sum(-1).mean() * 9
    copied = F.cross_entropy(by_distillation, told.argmax(-1)) if hard else divergence
    assert lesson.loss.item() == pytest.approx((0.7 * labels + 0.3 * copied).item(), rel=1e-5)
    with torch.no_grad(), disturbed(teacher.head.bias[:1]):
        assert hard or objective(student, given).loss != lesson.loss


def test_a_student_is_evaluated_by_what_it_answers() -> None:
    student = vitrail.create("deit-ti/4", **TINY).eval()
    given = batch()
    teacher = vitrail.create("vit-ti/4", **TINY)
    with torch.no_grad():
        lesson = distil(teacher, hard=True)(student, given)
        expected = F.cross_entropy(student(given.images), given.labels)
    assert lesson.loss.item() == pytest.approx(expected.item())


def test_a_teacher_learns_nothing_and_drops_nothing() -> None:
    student = vitrail.create("deit-ti/4", **TINY)
    teacher = vitrail.create("vit-ti/4", **TINY, drop_path=0.9).train()
    objective = distil(teacher, hard=False)
    objective(student.train(), batch()).loss.backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert student.distillation_head.weight.grad.abs().sum() > 0
    assert not teacher.training


def test_a_teacher_sees_the_pictures_as_it_was_taught() -> None:
    student, teacher = (vitrail.create("vit-ti/4", **TINY) for _ in range(2))
    assert as_seen_by(teacher, student, same := torch.randn(2, 3, 12, 20)) is same
    teacher.preprocess = Preprocess(
        resize=(24, 40), interpolation="bicubic", mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6)
    )
    grey = torch.full((1, 3, 12, 20), 0.25)  # (x − 0.5) / 0.5, so the pixels are 0.625
    seen = as_seen_by(teacher, student, grey)
    expected = torch.tensor([(0.625 - mean) / std for mean, std in ((0.1, 0.4), (0.2, 0.5), (0.3, 0.6))])
    assert seen.shape == (1, 3, 24, 40)
    assert distance(seen, expected[None, :, None, None].expand(1, 3, 24, 40)) < 1e-5
    assert math.isfinite(seen.sum())
