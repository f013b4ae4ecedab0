"""Multi-head attention against torch.nn.MultiheadAttention with the same weights."""

import pytest
import torch
from torch import Tensor, nn

from compare import distance, disturbed, randomise, same
from vitrail.attention import KeyValueCache, MultiHeadAttention, attend

WIDTH, HEADS, BATCH, QUERIES, KEYS = 24, 3, 2, 5, 7


def pair(
    keys_width: int | None = None, values_width: int | None = None, bias: bool = True
) -> tuple[MultiHeadAttention, nn.MultiheadAttention]:
    """Torch's module with random weights, and ours with the same."""
    theirs = nn.MultiheadAttention(
        WIDTH, HEADS, bias=bias, kdim=keys_width, vdim=values_width, batch_first=True
    ).double()
    randomise(theirs)
    ours = MultiHeadAttention(
        WIDTH, HEADS, keys_width=keys_width, values_width=values_width, qkv_bias=bias
    ).double()
    if not bias:  # torch's `bias` speaks for the output too
        nn.init.zeros_(ours.output.bias)
    state = theirs.state_dict()
    with torch.no_grad():
        for index, (name, layer) in enumerate([("q", ours.query), ("k", ours.key), ("v", ours.value)]):
            whole = state.get("in_proj_weight")
            layer.weight.copy_(state[f"{name}_proj_weight"] if whole is None else whole.chunk(3)[index])
            if bias:
                layer.bias.copy_(state["in_proj_bias"].chunk(3)[index])
    ours.output.load_state_dict(
        {name.removeprefix("out_proj."): x for name, x in state.items() if "out_proj" in name},
        strict=bias,
    )
    return ours, theirs


def gradients_of(module: nn.Module, output: Tensor, upstream: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(output, [*inputs, *module.parameters()], upstream))


def as_ours(theirs: nn.MultiheadAttention, gradients: list[Tensor]) -> list[Tensor]:
    """The gradients of torch's parameters in our order: query, key, value (weight, bias), output."""
    named = dict(zip([name for name, _ in theirs.named_parameters()], gradients, strict=True))
    whole = named.get("in_proj_weight")
    weights = [named[f"{name}_proj_weight"] for name in "qkv"] if whole is None else whole.chunk(3)
    biases = named["in_proj_bias"].chunk(3)
    flat = [x for both in zip(weights, biases, strict=True) for x in both]
    return [*flat, named["out_proj.weight"], named["out_proj.bias"]]


def case(name: str) -> tuple[dict, dict, Tensor, list[Tensor], tuple]:
    """What both modules are called with: (ours, torch's, x, what it looks at, their widths)."""
    x = torch.randn(BATCH, QUERIES, WIDTH, dtype=torch.float64, requires_grad=True)
    widths = {"cross": (None, None), "keys": (10, None), "values": (10, 14)}.get(name)
    if widths is None:
        looked_at, length = [], QUERIES
    else:
        length = KEYS
        looked_at = [
            torch.randn(BATCH, KEYS, width or WIDTH, dtype=torch.float64, requires_grad=True)
            for width in ((widths[0],) if name != "values" else widths)
        ]
    mask = torch.rand(QUERIES, length) > 0.4
    mask[:, 0] = True
    padding = torch.arange(length) < torch.tensor([[length], [3]])
    bias = torch.randn(HEADS, QUERIES, length, dtype=torch.float64)
    per_example = torch.stack([mask, ~mask | (torch.arange(length) == 0)])
    per_head = torch.rand(BATCH, HEADS, QUERIES, length) > 0.4
    per_head[..., 0] = True
    causal = torch.ones(QUERIES, length).tril().bool()
    # torch: True means "may not look"; masks for each example are flattened with the heads.
    ours, theirs = {
        "self": ({}, {}),
        "cross": ({}, {}),
        "keys": ({}, {}),
        "values": ({}, {}),
        "mask": ({"mask": mask}, {"attn_mask": ~mask}),
        "padding": ({"padding": padding}, {"key_padding_mask": ~padding}),
        "mask and padding": (
            {"mask": mask, "padding": padding},
            {"attn_mask": ~mask, "key_padding_mask": ~padding},
        ),
        "mask per example": (
            {"mask": per_example},
            {"attn_mask": ~per_example.repeat_interleave(HEADS, 0)},
        ),
        "mask per head": ({"mask": per_head}, {"attn_mask": ~per_head.flatten(0, 1)}),
        "bias": ({"bias": bias}, {"attn_mask": bias.repeat(BATCH, 1, 1)}),
        "causal": ({"causal": True}, {"attn_mask": ~causal, "is_causal": True}),
        "causal and padding": (
            {"causal": True, "padding": padding},
            {"attn_mask": ~causal, "key_padding_mask": ~padding},
        ),
    }[name]
    return ours, theirs, x, looked_at, widths or (None, None)


CASES = [
    "self", "cross", "keys", "values", "mask", "padding", "mask and padding",
    "mask per example", "mask per head", "bias", "causal", "causal and padding",
]  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_torchs_module(name: str) -> None:
    """The output, and the gradient of every input and every parameter."""
    how, their_how, x, looked_at, (keys_width, values_width) = case(name)
    if name == "keys":
        values_width = keys_width
    ours, theirs = pair(keys_width, values_width)
    keys, values = (looked_at * 2)[:2] if looked_at else (x, x)

    found = ours(x, *looked_at, **how)
    expected, _ = theirs(x, keys, values, need_weights=False, **their_how)
    assert distance(found, expected) < 1e-12

    upstream = torch.randn_like(found)
    inputs = [x, *looked_at]
    mine = gradients_of(ours, found, upstream, inputs)
    other = gradients_of(theirs, expected, upstream, inputs)
    other = other[: len(inputs)] + as_ours(theirs, other[len(inputs) :])
    for gradient, wanted in zip(mine, other, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=1e-12)

    for parameter in ours.parameters():
        with disturbed(parameter):
            moved = distance(ours(x, *looked_at, **how), expected)
        # Adding the same to every score of a row changes no softmax: the key's bias has no say.
        if parameter is ours.key.bias:
            assert moved < 1e-12
        else:
            assert moved > 1e-6
    assert same(ours(x, *looked_at, **how), found)


def test_without_biases() -> None:
    ours, theirs = pair(bias=False)
    assert ours.query.bias is ours.key.bias is ours.value.bias is None
    x = torch.randn(BATCH, QUERIES, WIDTH, dtype=torch.float64)
    assert distance(ours(x), theirs(x, x, x)[0]) < 1e-12


def test_head_widths_of_their_own() -> None:
    """Two heads of width 5 whose values are 7 wide, on a stream of width 9: head by head."""
    module = MultiHeadAttention(9, 2, head_width=5, value_head_width=7).double()
    assert module.query.out_features == module.key.out_features == 10
    assert (module.value.out_features, module.output.in_features) == (14, 14)
    x = torch.randn(BATCH, QUERIES, 9, dtype=torch.float64)
    heads = [
        (module.query(x)[..., 5 * h : 5 * h + 5] @ module.key(x)[..., 5 * h : 5 * h + 5].mT / 5**0.5)
        .softmax(-1) @ module.value(x)[..., 7 * h : 7 * h + 7]
        for h in range(2)
    ]  # fmt: skip
    assert distance(module(x), module.output(torch.cat(heads, -1))) < 1e-12


def test_qk_norm_makes_heads_deaf_to_length() -> None:
    """Layer norm forgets a vector's length: ten times the query weights give what they gave before."""
    plain, normed = (
        MultiHeadAttention(WIDTH, HEADS, qkv_bias=False, qk_norm=norm, norm_eps=0.0).double()
        for norm in (False, True)
    )
    x = torch.randn(BATCH, QUERIES, WIDTH, dtype=torch.float64)
    before = plain(x), normed(x)
    with torch.no_grad():
        plain.query.weight *= 10
        normed.query.weight *= 10
    assert distance(plain(x), before[0]) > 1e-3
    assert distance(normed(x), before[1]) < 1e-12


def test_a_padded_example_answers_as_if_alone() -> None:
    ours, theirs = pair()
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    padding = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    together = ours(x, padding=padding)
    alone = x[1:, :3]
    assert distance(together[1:, :3], theirs(alone, alone, alone)[0]) < 1e-12


def test_an_example_of_nothing_but_padding_is_the_output_bias() -> None:
    ours, _ = pair()
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64, requires_grad=True)
    found = ours(x, padding=torch.tensor([[True], [False]]).expand(2, 5))
    assert torch.equal(found[1], ours.output.bias.expand(5, -1))
    found.square().sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert (x.grad[1] == 0).all()


def test_dropout_is_for_training_only() -> None:
    module = MultiHeadAttention(WIDTH, HEADS, dropout=0.5)
    x = torch.randn(BATCH, QUERIES, WIDTH)
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert same(module(x), module(x))


@pytest.mark.parametrize("sizes", [[1] * 9, [4, 1, 3, 1], [9], [2, 7]], ids=str)
@torch.no_grad()
def test_decoding_with_a_cache_is_the_causal_forward(sizes: list[int]) -> None:
    ours, theirs = pair()
    x = torch.randn(BATCH, 9, WIDTH, dtype=torch.float64)
    given = x.clone()
    whole, _ = theirs(x, x, x, attn_mask=torch.ones(9, 9, dtype=torch.bool).triu(1))
    cache = KeyValueCache()
    pieces = [ours(chunk, causal=True, cache=cache) for chunk in x.split(sizes, 1)]
    assert distance(torch.cat(pieces, 1), whole) < 1e-12
    assert cache.length == 9
    keys, values = cache.kept
    assert keys.shape == values.shape == (BATCH, HEADS, 9, WIDTH // HEADS)
    assert same(x, given)


@torch.no_grad()
def test_decoding_with_padding_is_the_padded_forward() -> None:
    ours, theirs = pair()
    x = torch.randn(BATCH, 6, WIDTH, dtype=torch.float64)
    padding = torch.arange(6) >= torch.tensor([[0], [2]])  # shorter prompts are padded at the left
    later = torch.ones(6, 6, dtype=torch.bool).triu(1)
    whole, _ = theirs(x, x, x, attn_mask=later, key_padding_mask=~padding, need_weights=False)
    cache = KeyValueCache()
    for t in range(6):
        step = ours(x[:, t : t + 1], causal=True, padding=padding[:, : t + 1], cache=cache)
        real = padding[:, t]
        torch.testing.assert_close(step[real, 0], whole[real, t])


@torch.no_grad()
def test_keys_of_cross_attention_are_made_once() -> None:
    ours, theirs = pair()
    x = torch.randn(BATCH, 4, WIDTH, dtype=torch.float64)
    memory = torch.randn(BATCH, KEYS, WIDTH, dtype=torch.float64)
    whole, _ = theirs(x, memory, memory)
    made = []
    for layer in (ours.key, ours.value):
        layer.register_forward_hook(lambda layer, *_: made.append(layer))
    cache = KeyValueCache()
    for t in range(4):
        step = ours(x[:, t : t + 1], memory, cache=cache)
        torch.testing.assert_close(step, whole[:, t : t + 1])
    assert made == [ours.key, ours.value]
    assert cache.length == KEYS


@torch.no_grad()
def test_a_cache_copies_what_it_holds_only_now_and_then() -> None:
    """Doubling: 64 tokens one by one need log₂ 64 = 6 new places, not 63."""
    cache = KeyValueCache()
    places = set()
    for t in range(64):
        new = torch.full((1, 1, 1, 2), float(t))
        keys, values = cache.extend(new, -new)
        places.add(keys.data_ptr())
        assert torch.equal(keys[0, 0, :, 0], torch.arange(t + 1.0))
        assert torch.equal(values, -keys)
    assert len(places) <= 7


@torch.no_grad()
def test_what_does_not_fit_leaves_a_cache_as_it_was() -> None:
    cache = KeyValueCache()
    first = torch.randn(2, 1, 3, 4)
    cache.extend(first, first)
    with pytest.raises(RuntimeError):
        cache.extend(torch.randn(2, 1, 1, 4), torch.randn(5, 1, 1, 4))
    assert cache.length == 3
    assert all(same(kept, first) for kept in cache.kept)


def test_an_empty_cache_says_so() -> None:
    with pytest.raises(ValueError, match="nothing has been cached yet"):
        _ = KeyValueCache().kept


def test_a_width_that_heads_do_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match=r"width 10 does not divide into 3 heads.*head_width"):
        MultiHeadAttention(10, 3)
    assert MultiHeadAttention(10, 3, head_width=4)(torch.randn(1, 2, 10)).shape == (1, 2, 10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lower_precision_is_near(dtype: torch.dtype) -> None:
    ours, theirs = pair()
    x = torch.randn(BATCH, QUERIES, WIDTH, dtype=torch.float64)
    expected = theirs(x, x, x)[0]
    found = ours.to(dtype)(x.to(dtype))
    assert found.dtype == dtype
    assert distance(found, expected) < (1e-5 if dtype == torch.float32 else 5e-2)


def test_all_heads_go_through_the_one_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []

    def watched(q: Tensor, k: Tensor, v: Tensor, **how: object) -> Tensor:
        shapes.append((q.shape, k.shape, v.shape))
        return attend(q, k, v, **how)  # type: ignore[arg-type]

    monkeypatch.setattr("vitrail.attention.multihead.attend", watched)
    MultiHeadAttention(WIDTH, HEADS)(torch.randn(BATCH, QUERIES, WIDTH))
    assert shapes == [((BATCH, HEADS, QUERIES, WIDTH // HEADS),) * 3]
