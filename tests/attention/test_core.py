"""`attend` against torch's own attention, and against the formula in float64 with loops."""

import itertools
import math
import threading
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from compare import distance, same
from vitrail.attention import BACKENDS, attend, attention_weights, backend, core, weigh

ON_CPU = ("fused", "flash", "math", "explicit", "matmul")
# batch, heads, queries, keys, width, value width
SHAPES = [(2, 3, 5, 5, 8, 8), (1, 1, 1, 1, 1, 1), (2, 2, 3, 7, 4, 6), (1, 4, 9, 2, 5, 3)]


def qkv(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, queries, keys, width, value_width = shape
    return (
        torch.randn(batch, heads, queries, width, dtype=dtype),
        torch.randn(batch, heads, keys, width, dtype=dtype),
        torch.randn(batch, heads, keys, value_width, dtype=dtype),
    )


def by_loops(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(q·k / √d + bias) and its average of the values, one number at a time."""
    lead, (queries, width), keys = q.shape[:-2], q.shape[-2:], k.shape[-2]
    scale = 1 / math.sqrt(width) if scale is None else scale
    full = (*lead, queries, keys)
    mask = torch.ones(full, dtype=torch.bool) if mask is None else mask.expand(full)
    bias = torch.zeros(full) if bias is None else bias.expand(full)
    weights = torch.zeros(full, dtype=torch.float64)
    for *where, i in itertools.product(*(range(n) for n in (*lead, queries))):
        scores = {
            j: scale * math.fsum((q[(*where, i)] * k[(*where, j)]).tolist()) + bias[(*where, i, j)].item()
            for j in range(keys)
            if mask[(*where, i, j)] and not (causal and j > i + keys - queries)
        }
        scores = {j: score for j, score in scores.items() if score != -math.inf}
        highest = max(scores.values(), default=0.0)
        exponentials = {j: math.exp(score - highest) for j, score in scores.items()}
        for j, exponential in exponentials.items():
            weights[(*where, i, j)] = exponential / math.fsum(exponentials.values())
    return weights, weights @ v.double()


def some_mask(q: Tensor, k: Tensor) -> Tensor:
    """Half of everything, and the first query of the first example sees nothing."""
    mask = torch.rand(*q.shape[:-1], k.shape[-2]) > 0.5
    mask[0, 0, 0] = False
    return mask


def some_bias(q: Tensor, k: Tensor) -> Tensor:
    """Numbers with -inf among them, one row of nothing else; the same for every example."""
    bias = torch.randn(q.shape[1], q.shape[2], k.shape[2], dtype=q.dtype)
    bias[bias > 1.0] = -torch.inf
    bias[-1, -1] = -torch.inf
    return bias


HOW = ["plain", "mask", "bias", "both", "causal", "causal and both", "scale"]


def arguments(how: str, q: Tensor, k: Tensor) -> dict:
    given: dict = {}
    if how in ("mask", "both", "causal and both"):
        given["mask"] = some_mask(q, k)
    if how in ("bias", "both", "causal and both"):
        given["bias"] = some_bias(q, k)
    if how.startswith("causal"):
        given["causal"] = True
    if how == "scale":
        given["scale"] = 0.7
    return given


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("how", HOW)
def test_the_formula(shape: tuple[int, ...], how: str) -> None:
    q, k, v = qkv(shape)
    given = arguments(how, q, k)
    weights, expected = by_loops(q, k, v, **given)
    torch.testing.assert_close(attention_weights(q, k, **given), weights, rtol=1e-12, atol=1e-12)
    for name in ("fused", "math", "explicit", "matmul"):
        with backend(name):
            torch.testing.assert_close(attend(q, k, v, **given), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("how", HOW)
def test_the_formula_is_sensitive(how: str) -> None:
    """The comparison above fails when one entry of the keys is another."""
    q, k, v = qkv(SHAPES[2])
    given = arguments(how, q, k)
    given.pop("mask", None)  # so that the disturbed key is seen
    _, expected = by_loops(q, k, v, **given)
    k[0, 0, 0, 0] += 0.5
    assert distance(attend(q, k, v, **given), expected) > 1e-4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("how", HOW)
def test_every_backend_is_torchs_attention(how: str, name: str, dtype: torch.dtype) -> None:
    """Values, and gradients of q, k and v; torch sees no blind rows here, where it has no convention."""
    q, k, v = (x.requires_grad_() for x in qkv((2, 3, 6, 6, 8, 8), dtype))
    given = arguments(how, q, k)
    visible = torch.ones(2, 3, 6, 6, dtype=torch.bool)
    if "mask" in given:
        given["mask"] = visible = given["mask"] | torch.eye(6, dtype=torch.bool)
    if "bias" in given:
        given["bias"] = torch.where(torch.eye(6, dtype=torch.bool), 0.3, given["bias"])
    if given.get("causal"):
        visible = visible.tril()
    added = torch.zeros(2, 3, 6, 6, dtype=dtype).masked_fill(~visible, -torch.inf)
    added = added + given.get("bias", 0.0)
    upstream = torch.randn(2, 3, 6, 8, dtype=dtype)

    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=added, scale=given.get("scale"))
    expected_gradients = torch.autograd.grad(expected, (q, k, v), upstream)
    with backend(name):
        found = attend(q, k, v, **given)
        gradients = torch.autograd.grad(found, (q, k, v), upstream)
    assert found.dtype == dtype
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    assert distance(found, expected) < tolerance
    for gradient, wanted in zip(gradients, expected_gradients, strict=True):
        assert distance(gradient, wanted) < tolerance


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("how", ["mask", "bias", "both", "causal"])
def test_a_blind_row_gives_zeros_and_clean_gradients(how: str, name: str) -> None:
    """causal: with 6 queries on 4 keys, the first two come before all keys."""
    q, k, v = (x.requires_grad_() for x in qkv((2, 3, 6, 4, 8, 8), torch.float32))
    given: dict = {"causal": True} if how == "causal" else {}
    if how in ("mask", "both"):
        given["mask"] = torch.ones(6, 4, dtype=torch.bool)
        given["mask"][:2] = False
    if how in ("bias", "both"):
        given["bias"] = torch.randn(6, 4)
        given["bias"][:2] = -torch.inf
    weights = attention_weights(q, k, **given)
    with backend(name):
        found = attend(q, k, v, **given)
    assert torch.equal(found[:, :, :2], torch.zeros(2, 3, 2, 8))
    assert torch.equal(weights[:, :, :2], torch.zeros(2, 3, 2, 4))
    torch.testing.assert_close(weights[:, :, 2:].sum(-1), torch.ones(2, 3, 4))
    gradients = torch.autograd.grad(found.square().sum() + weights.square().sum(), (q, k, v))
    for gradient in gradients:
        assert gradient.isfinite().all()
    assert (gradients[0][:, :, :2] == 0).all()
    assert (gradients[0][:, :, 2:] != 0).any()


def test_leading_dimensions_may_be_none_or_many() -> None:
    q, k, v = (x[0, 0] for x in qkv(SHAPES[2]))
    torch.testing.assert_close(attend(q, k, v), by_loops(q, k, v)[1])
    q, k, v = torch.randn(2, 3, 4, 5, 8), torch.randn(2, 3, 4, 6, 8), torch.randn(2, 3, 4, 6, 7)
    torch.testing.assert_close(attend(q, k, v), by_loops(*(x.double() for x in (q, k, v)))[1].float())


@pytest.mark.parametrize("name", ["fused", "math", "explicit", "matmul"])
def test_leading_dimensions_broadcast(name: str) -> None:
    q, k, v = torch.randn(3, 2, 5, 8), torch.randn(2, 6, 8), torch.randn(1, 2, 6, 4)
    mask = torch.ones(5, 6, dtype=torch.bool).tril(1)
    with backend(name):
        found = attend(q, k, v, mask=mask)
    whole = (x.expand(3, 2, *x.shape[-2:]).double() for x in (q, k, v))
    torch.testing.assert_close(found, by_loops(*whole, mask=mask)[1].float())


@pytest.mark.parametrize("lead", [(), (3,), (3, 2), (2, 3, 2), (2, 1, 3, 2)], ids=str)
@pytest.mark.parametrize("how", ["plain", "mask", "blind", "bias", "causal"])
def test_any_leading_dimensions_stay_on_the_fused_kernel(how: str, lead: tuple[int, ...]) -> None:
    q = torch.randn(*lead, 5, 8)
    given = {
        "plain": {},
        "mask": {"mask": torch.rand(5, 5) > 0.3},
        "blind": {"mask": torch.arange(5)[:, None].expand(5, 5) > 0},
        "bias": {"bias": torch.randn((*lead[-1:], 5, 5))},
        "causal": {"causal": True},
    }[how]
    with torch.profiler.profile() as profile:
        found = attend(q, q, q, **given)
    kernels = {event.key for event in profile.key_averages()}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in kernels
    torch.testing.assert_close(found, by_loops(*[q.double()] * 3, **given)[1].float())


def test_a_mask_is_never_written_out_in_floats() -> None:
    """One example of a mask for a batch of 64 costs what it costs for one: a few booleans."""
    q, mask = torch.randn(64, 2, 32, 8), torch.rand(32, 32) > 0.3
    with torch.profiler.profile(profile_memory=True) as profile:
        attend(q, q, q, mask=mask)
    taken = max(event.cpu_memory_usage for event in profile.events() if event.name == "aten::bitwise_or")
    assert taken == mask.numel()


def test_one_causal_query_builds_no_mask() -> None:
    """The last query sees all keys, so decoding with a cache is plain attention."""
    q, k, v = qkv((2, 3, 1, 7, 8, 8), torch.float32)
    with torch.profiler.profile() as profile:
        found = attend(q, k, v, causal=True)
    assert "aten::tril" not in {event.key for event in profile.key_averages()}
    torch.testing.assert_close(found, F.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize("queries", [1, 2, 5])
def test_causal_queries_are_the_last_of_the_keys(queries: int) -> None:
    """Whoever asks for the last queries only gets the last rows of the whole."""
    q, k, v = qkv((1, 2, 5, 5, 4, 4))
    whole = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(attend(q[:, :, -queries:], k, v, causal=True), whole[:, :, -queries:])
    weights = attention_weights(q, k, causal=True)
    assert torch.equal(weights, weights.tril())


def test_half_precision_weights_are_float32() -> None:
    q, k, _ = qkv((1, 2, 4, 4, 8, 8), torch.bfloat16)
    weights = attention_weights(q, k)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, (q.float() @ k.float().mT / 8**0.5).softmax(-1))


def test_autocast() -> None:
    q, k, v = qkv((1, 2, 4, 4, 8, 8), torch.float32)
    bias = torch.randn(4, 4)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    exact = (q @ k.mT / 8**0.5 + bias).softmax(-1)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(attention_weights(q, k, bias=bias), exact)
        for name in ("fused", "math", "explicit", "matmul"):
            with backend(name):
                found = attend(q, k, v, bias=bias)
            assert found.dtype == torch.bfloat16
            assert distance(found, expected) < 2e-2


@pytest.mark.parametrize("name", ["fused", "math", "explicit", "matmul"])
def test_dropout_drops_weights_and_keeps_their_mean(name: str) -> None:
    """With values of the identity the output is the weights: zero, or 1 / (1 - p) times what they were."""
    draws, keys, p = 400, 16, 0.25
    q, k = torch.randn(1, 1, 4, 8), torch.randn(1, 1, keys, 8)
    weights = (q @ k.mT / 8**0.5).softmax(-1)
    with backend(name):
        found = attend(
            q.expand(draws, 1, 4, 8),
            k.expand(draws, 1, keys, 8),
            torch.eye(keys).expand(draws, 1, keys, keys),
            dropout=p,
        )
    kept = found != 0
    torch.testing.assert_close(found[kept], (weights / (1 - p)).expand_as(found)[kept])
    # The share kept is a mean of n Bernoulli draws; five standard deviations are never left by chance.
    n = kept.numel()
    assert abs(kept.float().mean().item() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / n)
    with backend(name):
        assert same(attend(q, k, k, dropout=0.0), attend(q, k, k))


@pytest.mark.parametrize("function", [attend, attention_weights])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8])
def test_a_mask_of_numbers_is_refused(function: object, dtype: torch.dtype) -> None:
    tensors = (torch.randn(3, 4),) * (3 if function is attend else 2)
    with pytest.raises(TypeError, match=f"mask has dtype {dtype}.*bias="):
        function(*tensors, mask=torch.ones(3, 3, dtype=dtype))  # type: ignore[operator]


def test_a_mask_is_no_bias() -> None:
    q, k, v = qkv((1, 2, 4, 4, 8, 8))
    for call in (partial(attend, q, k, v), partial(attention_weights, q, k)):
        with pytest.raises(TypeError, match=r"bias is boolean.*as mask="):
            call(bias=torch.ones(4, 4, dtype=torch.bool))


def test_one_mask_for_all_keys() -> None:
    """(queries, 1): whole rows may look, or not."""
    q, k, v = qkv((1, 2, 4, 6, 8, 8))
    mask = torch.tensor([[True], [False], [True], [True]])
    expected = (q @ k.mT / 8**0.5).softmax(-1) @ v * mask
    assert distance(attend(q, k, v, mask=mask), expected) < 1e-5


@pytest.mark.parametrize("name", ["fused", "explicit", "matmul"])
def test_a_bias_too_great_for_half_precision(name: str) -> None:
    """The same for all keys, it changes nothing; as infinity it would make NaN."""
    q, k, v = qkv((1, 1, 3, 4, 8, 8), torch.float16)
    with backend(name):
        found = attend(q, k, v, bias=torch.full((3, 4), 1e5))
    expected = (q.float() @ k.float().mT / 8**0.5).softmax(-1) @ v.float()
    assert found.isfinite().all()
    assert distance(found.float(), expected) < 0.3


def test_backend_is_put_back() -> None:
    assert core._chosen == "fused"
    with backend("math"):
        with pytest.raises(RuntimeError, match="on the way"), backend("explicit"):
            raise RuntimeError("on the way")
        assert core._chosen == "math"
    assert core._chosen == "fused"


def test_backends_of_two_threads_that_end_in_another_order() -> None:
    """The first thread to enter is the first to leave; what the second chose goes on, and ends with it."""
    first_is_in, second_is_in, first_is_out = (threading.Event() for _ in range(3))
    found = []

    def first() -> None:
        with backend("math"):
            first_is_in.set()
            second_is_in.wait()
        first_is_out.set()

    thread = threading.Thread(target=first)
    thread.start()
    first_is_in.wait()
    with backend("explicit"):
        second_is_in.set()
        first_is_out.wait()
        found.append(core._chosen)
    thread.join()
    assert [*found, core._chosen] == ["explicit", "fused"]


def test_an_unknown_backend_is_an_error_that_names_them_all() -> None:
    with pytest.raises(ValueError, match="'triton'.*" + ", ".join(BACKENDS)), backend("triton"):
        pass


@pytest.mark.parametrize("name", ["flash", "math"])
def test_a_backend_runs_the_kernel_that_it_names(name: str) -> None:
    q, k, v = qkv((1, 2, 4, 4, 8, 8), torch.float32)
    with torch.profiler.profile() as profile, backend(name):
        attend(q, k, v)
    kernels = {event.key for event in profile.key_averages()}
    assert ("aten::_scaled_dot_product_flash_attention_for_cpu" in kernels) == (name == "flash")
    assert ("aten::_scaled_dot_product_attention_math" in kernels) == (name == "math")


@pytest.mark.parametrize("shape", [(4, 4), (2, 4, 4), (1, 2, 4, 4), (3, 1, 1, 4), (4,)], ids=str)
def test_a_mask_or_bias_of_any_shape_stays_on_the_fused_kernel(shape: tuple[int, ...]) -> None:
    q, k, v = qkv((3, 2, 4, 4, 8, 8), torch.float32)
    bias = torch.randn(shape)
    with torch.profiler.profile() as profile:
        found = attend(q, k, v, bias=bias, mask=bias > -1.0)
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in {
        event.key for event in profile.key_averages()
    }
    bias = bias.masked_fill(bias <= -1.0, -torch.inf)
    torch.testing.assert_close(found, by_loops(q, k, v, bias=bias)[1].float())


@pytest.mark.parametrize("name", ["fused", "explicit", "matmul"])
@pytest.mark.parametrize("how", ["plain", "both", "causal"])
def test_gradients_are_those_of_finite_differences(how: str, name: str) -> None:
    q, k, v = (x.requires_grad_() for x in qkv((1, 2, 3, 4, 3, 2)))
    given = arguments(how, q, k)
    with backend(name):
        assert torch.autograd.gradcheck(lambda *x: attend(*x, **given), (q, k, v))
        assert torch.autograd.gradcheck(lambda *x: attention_weights(*x, **given), (q, k))


def test_weigh_is_softmax_over_what_may_be_seen() -> None:
    scores = torch.tensor([[0.0, math.log(3.0), 5.0], [1.0, 2.0, 3.0]])
    mask = torch.tensor([[True, True, False], [False, False, False]])
    torch.testing.assert_close(weigh(scores, mask=mask), torch.tensor([[0.25, 0.75, 0.0], [0.0, 0.0, 0.0]]))


sizes = st.tuples(*(st.integers(1, 6),) * 3)


@settings(max_examples=40, deadline=None)
@given(sizes, st.integers(0, 2**31), st.floats(0.0, 1.0), st.floats(0.1, 50.0))
def test_rows_sum_to_one_or_nothing(
    size: tuple[int, int, int], seed: int, share: float, spread: float
) -> None:
    queries, keys, width = size
    torch.manual_seed(seed)
    q, k = spread * torch.randn(queries, width), spread * torch.randn(keys, width)
    mask = torch.rand(queries, keys) < share
    weights = attention_weights(q, k, mask=mask)
    assert (weights >= 0).all()
    assert (weights[~mask] == 0).all()
    torch.testing.assert_close(weights.sum(-1), mask.any(-1).float())


@settings(max_examples=40, deadline=None)
@given(sizes, st.integers(0, 2**31))
def test_the_order_of_tokens_does_not_matter(size: tuple[int, int, int], seed: int) -> None:
    """Shuffled queries give shuffled answers; keys shuffled with their values give the same ones."""
    queries, keys, width = size
    torch.manual_seed(seed)
    q, k, v = (torch.randn(n, width, dtype=torch.float64) for n in (queries, keys, keys))
    bias = torch.randn(queries, keys, dtype=torch.float64)
    there, here = torch.randperm(queries), torch.randperm(keys)
    expected = attend(q, k, v, bias=bias)[there]
    torch.testing.assert_close(attend(q[there], k[here], v[here], bias=bias[there][:, here]), expected)


@settings(max_examples=40, deadline=None)
@given(sizes, st.integers(0, 2**31))
def test_a_masked_key_might_as_well_not_be_there(size: tuple[int, int, int], seed: int) -> None:
    queries, keys, width = size
    torch.manual_seed(seed)
    q, k, v = (torch.randn(n, width, dtype=torch.float64) for n in (queries, keys + 1, keys + 1))
    mask = torch.arange(keys + 1) < keys
    expected = attend(q, k[:-1], v[:-1])
    k[-1] = v[-1] = 1e6
    torch.testing.assert_close(attend(q, k, v, mask=mask.expand(queries, -1)), expected)


@pytest.mark.parametrize("name", ["fused", "math", "flash", "explicit", "matmul"])
def test_one_example_with_several_masks(name: str) -> None:
    q, k, v = torch.randn(3, 1, 3, 5, 8).unbind()
    mask = (torch.rand(2, 1, 5, 5) > 0.3) | torch.eye(5, dtype=torch.bool)
    with backend(name):
        found = attend(q, k, v, mask=mask)
    expected = F.scaled_dot_product_attention(*(x.expand(2, 3, 5, 8) for x in (q, k, v)), attn_mask=mask)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("far", [torch.finfo(torch.float32).min, -1e9])
def test_a_bias_too_great_for_half_precision_stays_finite(dtype: torch.dtype, far: float) -> None:
    """A whole row of it leaves the weights as they were (or all alike), in the kernel as beside it."""
    q = torch.randn(1, 1, 4, 8, dtype=dtype)
    bias = torch.zeros(4, 4)
    bias[0] = far
    weights = attention_weights(q, q, bias=bias)
    assert torch.allclose(weights.sum(-1), torch.ones(1, 1, 4))
    for name in ("fused", "math", "explicit", "matmul"):
        with backend(name):
            assert torch.allclose(attend(q, q, q, bias=bias).float(), weights @ q.float(), atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["fused", "math", "explicit", "matmul"])
def test_a_bias_too_great_for_autocasts_type_stays_finite(name: str, dtype: torch.dtype) -> None:
    """A whole row of it looks as if without it; or, where it swallows all scores, at all keys alike."""
    q = torch.randn(1, 1, 4, 8)
    bias = torch.zeros(4, 4)
    bias[0] = torch.finfo(torch.float32).min
    with torch.autocast("cpu", dtype), backend(name):
        found = attend(q, q, q, bias=bias)
    expected = F.scaled_dot_product_attention(q, q, q)[0, 0, 0], q.mean(-2)[0, 0]
    assert min(distance(found[0, 0, 0], either) for either in expected) < 2e-2


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_attention_compiles_in_one_piece(precision: torch.dtype) -> None:
    def twice(q: Tensor, bias: Tensor) -> Tensor:
        assert core._reliable()  # what a GPU would ask
        return attend(q, q, q, bias=bias) + attend(q, q, q, causal=True)

    q, bias = torch.randn(1, 2, 4, 8), torch.randn(4, 4)
    whole = torch.compile(twice, backend="eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
        assert same(whole(q, bias), twice(q, bias))


def test_what_the_person_switched_off_on_a_gpu_stays_off() -> None:
    everything = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    assert core._reliable() == everything
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION]):
        assert core._reliable() == [SDPBackend.MATH]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        assert core._reliable() == []


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_bias_of_a_coarser_type_than_the_queries(name: str, dtype: torch.dtype) -> None:
    q, k, v = qkv((2, 2, 3, 7, 4, 4))
    bias = torch.randint(-3, 3, (3, 7)).to(dtype)
    with backend(name):
        found = attend(q, k, v, bias=bias)
    assert distance(found, by_loops(q, k, v, bias=bias.double())[1]) < 1e-12
