"""Attention by alignment, soft and hard, against the formulas with loops."""

import math

import pytest
import torch
from torch import Tensor, nn

from compare import distance, disturbed, randomise
from vitrail.attention import AdditiveScore, AlignmentAttention, BilinearScore, align

BATCH, QUERIES, KEYS, QUERY_WIDTH, KEY_WIDTH, WIDTH = 2, 3, 4, 5, 6, 7


def additive_by_loops(score: AdditiveScore, s: Tensor, h: Tensor) -> float:
    """Bahdanau et al., A.1.2: vᵀ tanh(W s + U h), one number at a time."""
    W, b = score.query.weight.tolist(), score.query.bias
    U, v = score.key.weight.tolist(), score.score.weight[0].tolist()
    total = 0.0
    for row in range(len(v)):
        inside = sum(w * x for w, x in zip(W[row], s.tolist(), strict=True))
        inside += sum(u * x for u, x in zip(U[row], h.tolist(), strict=True))
        total += v[row] * math.tanh(inside + (0.0 if b is None else b[row].item()))
    return total


def bilinear_by_loops(score: BilinearScore, s: Tensor, h: Tensor) -> float:
    """Luong et al., equation 8: sᵀ W h."""
    W = score.key.weight.tolist()
    return sum(s[i].item() * W[i][j] * h[j].item() for i in range(len(s)) for j in range(len(h)))


def average(scores: list[float], values: Tensor, visible: list[bool]) -> Tensor:
    """a = softmax(e), c = Σ a h over the keys that may be seen."""
    context = torch.zeros(values.shape[-1], dtype=values.dtype)
    total = sum(math.exp(e) for e, seen in zip(scores, visible, strict=True) if seen)
    for e, value, seen in zip(scores, values, visible, strict=True):
        if seen:
            context += math.exp(e) / total * value
    return context


def scorer(kind: str) -> tuple[nn.Module, object]:
    made: dict[str, tuple[nn.Module, object]] = {
        "additive": (AdditiveScore(QUERY_WIDTH, KEY_WIDTH, WIDTH), additive_by_loops),
        "no bias": (AdditiveScore(QUERY_WIDTH, KEY_WIDTH, WIDTH, bias=False), additive_by_loops),
        "bilinear": (BilinearScore(QUERY_WIDTH, KEY_WIDTH), bilinear_by_loops),
    }
    module, formula = made[kind]
    randomise(module.double())
    return module, formula


@pytest.mark.parametrize("own_values", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", ["additive", "no bias", "bilinear"])
def test_the_formula(kind: str, masked: bool, own_values: bool) -> None:
    module, formula = scorer(kind)
    attention = AlignmentAttention(module)
    s = torch.randn(BATCH, QUERIES, QUERY_WIDTH, dtype=torch.float64)
    h = torch.randn(BATCH, KEYS, KEY_WIDTH, dtype=torch.float64)
    values = torch.randn(BATCH, KEYS, 3, dtype=torch.float64) if own_values else None
    mask = torch.ones(BATCH, QUERIES, KEYS, dtype=torch.bool)
    if masked:
        mask = torch.rand(BATCH, QUERIES, KEYS) > 0.5
        mask[0, 0] = False  # one query sees nothing

    averaged = h if values is None else values
    expected = torch.stack([
        torch.stack([
            average(
                [formula(module, s[b, t], h[b, j]) for j in range(KEYS)],  # type: ignore[operator]
                averaged[b],
                mask[b, t].tolist(),
            )
            for t in range(QUERIES)
        ])
        for b in range(BATCH)
    ])  # fmt: skip
    found = attention(s, h, values, mask=mask if masked else None)
    assert found.log_probability is None
    torch.testing.assert_close(found.context, expected)
    for parameter in module.parameters():
        with disturbed(parameter):
            assert distance(attention(s, h, values, mask=mask).context, expected) > 1e-4


def test_gradients_are_those_of_finite_differences() -> None:
    module, _ = scorer("additive")
    s = torch.randn(1, 2, QUERY_WIDTH, dtype=torch.float64, requires_grad=True)
    h = torch.randn(1, 3, KEY_WIDTH, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[[True, True, False], [False, False, False]]])
    assert torch.autograd.gradcheck(lambda s, h: AlignmentAttention(module)(s, h, mask=mask).context, (s, h))


def test_hard_attention_draws_by_its_probabilities() -> None:
    """Values of the identity show what was drawn; each share lies within five standard deviations."""
    draws, law = 20_000, torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    found = align(
        law.log().expand(1, draws, 5),
        torch.eye(5)[None],
        hard=True,
    )
    choice = found.context[0]
    assert torch.equal(choice.sum(-1), torch.ones(draws))
    assert set(choice.unique().tolist()) == {0.0, 1.0}
    for share, p in zip(choice.mean(0).tolist(), law.tolist(), strict=True):
        assert abs(share - p) <= 5 * math.sqrt(p * (1 - p) / draws)
    assert found.log_probability is not None
    torch.testing.assert_close(found.log_probability[0], law[choice.argmax(-1)].log())


def test_hard_attention_obeys_the_mask() -> None:
    scores = torch.tensor([[[0.0, 0.0, math.log(3.0)]]]).expand(1, 1000, 3)
    mask = torch.tensor([True, False, True])
    found = align(scores, torch.eye(3)[None], mask=mask, hard=True)
    assert (found.context[..., 1] == 0).all()
    assert found.log_probability is not None
    law = torch.tensor([0.25, 0.0, 0.75])
    torch.testing.assert_close(found.log_probability[0], law[found.context[0].argmax(-1)].log())


@pytest.mark.parametrize("hard", [False, True])
def test_a_blind_query_gives_zeros_and_clean_gradients(hard: bool) -> None:
    scores = torch.randn(1, 2, 3, requires_grad=True)
    values = torch.randn(1, 3, 4, requires_grad=True)
    mask = torch.tensor([[True, True, True], [False, False, False]])
    found = align(scores, values, mask=mask, hard=hard)
    assert (found.context[0, 1] == 0).all()
    assert (found.context[0, 0] != 0).all()
    loss = found.context.sum()
    if found.log_probability is not None:
        assert found.log_probability[0, 1] == 0
        assert found.log_probability[0, 0] < 0
        loss = loss + found.log_probability.sum()
    loss.backward()
    assert scores.grad is not None
    assert values.grad is not None
    assert scores.grad.isfinite().all()
    assert values.grad.isfinite().all()
    assert (scores.grad[0, 1] == 0).all()
    assert (scores.grad[0, 0] != 0).any()


def test_reinforce_is_the_gradient_of_the_expected_reward() -> None:
    """E[r] = Σ p r, so ∂E/∂e_k = p_k (r_k - E[r]); the draws' own spread says how near is near."""
    draws = 20_000
    reward = torch.tensor([1.0, -2.0, 0.5, 3.0])
    e = torch.tensor([0.2, -0.5, 1.0, 0.0])
    p = e.softmax(0)
    expected = p * (reward - (p * reward).sum())

    one_each = e.expand(1, draws, 4).clone().requires_grad_()  # a copy of e for every draw
    found = align(one_each, reward[None, :, None], hard=True)
    assert not found.context.requires_grad  # choosing has no gradient: only its log-probability has
    assert found.log_probability is not None
    (found.log_probability * found.context[..., 0]).sum().backward()
    assert one_each.grad is not None
    samples = one_each.grad[0]  # (draws, 4)
    error = (samples.mean(0) - expected).abs()
    assert (error < 5 * samples.std(0) / math.sqrt(draws)).all()
    assert (expected.abs() > 10 * samples.std(0) / math.sqrt(draws)).all()  # not lost in the noise


def test_any_module_can_be_the_alignment_function() -> None:
    """Scores of one key alone: every query finds it."""

    class First(nn.Module):
        def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
            return torch.tensor([50.0, 0.0, 0.0]).expand(len(keys), queries.shape[1], 3)

    s, h = torch.randn(2, 4, 5), torch.randn(2, 3, 6)
    torch.testing.assert_close(AlignmentAttention(First())(s, h).context, h[:, :1].expand(2, 4, 6))
