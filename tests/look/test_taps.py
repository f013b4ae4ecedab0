"""The weights behind every kind of attention, in whose models ever."""

from collections.abc import Callable
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vitrail
from compare import distance, disturbed, randomise, same
from judges import timm
from looking import LAYERS, assert_nothing_left, by_hand, pictures, small, transformers_vit
from vitrail.attention import (
    AdditiveScore,
    AlignmentAttention,
    KeyValueCache,
    MultiHeadAttention,
    attention_weights,
    backend,
)


@pytest.mark.parametrize("name", ["fused", "math", "explicit", "matmul"])
def test_whatever_the_backend(name: str) -> None:
    model, images = small(), pictures()
    expected = by_hand(model, images)
    with backend(name), vitrail.record(model) as seen:
        output = model(images)
    with backend(name):
        assert same(model(images), output)
    for layer, weights in zip(LAYERS, expected, strict=True):
        assert distance(seen[layer].weights, weights) < 1e-5


def test_unchosen_layers_compute_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []

    def counted(*args: Tensor, **how: object) -> Tensor:
        computed.append(args)
        return attention_weights(*args, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(import_module("vitrail.look.taps"), "attention_weights", counted)
    model = small()
    with vitrail.record(model, 1):
        model(pictures())
    assert len(computed) == 1
    model(pictures())
    assert len(computed) == 1


def test_transformers_eager_attentions() -> None:
    """The sdpa model, recorded, against its eager twin's output_attentions."""
    images = pictures(size=(24, 24))
    model, twin = transformers_vit("sdpa"), transformers_vit("eager")
    with torch.no_grad():
        plain = model(images).last_hidden_state
        with torch.profiler.profile() as profile, vitrail.record(model) as seen:
            output = model(images).last_hidden_state
        expected = twin(images, output_attentions=True).attentions
    assert same(output, plain)
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls["aten::_scaled_dot_product_flash_attention_for_cpu"] == 2
    assert len(seen) == len(expected) == 2
    for call, weights in zip(seen.values(), expected, strict=True):
        assert call.weights.shape == weights.shape == (2, 4, 10, 10)
        assert (call.weights - weights).abs().max() < 1e-5
        assert call.grid == (3, 3)
        assert call.map().shape == (2, 4, 3, 3)
    with disturbed(next(iter(model.parameters()))), vitrail.record(model) as moved:
        model(images)
    assert any(
        (call.weights - weights).abs().max() > 1e-4
        for call, weights in zip(moved.values(), expected, strict=True)
    )
    with vitrail.record(twin) as eager:
        twin(images)
    for call, weights in zip(eager.values(), expected, strict=True):
        assert same(call.weights, weights)


def test_our_vit_sees_what_transformers_sees() -> None:
    """Our model with transformers' weights, against transformers' own attentions."""
    theirs = transformers_vit("eager")
    ours = vitrail.create(
        "vit-ti/8", width=16, depth=2, heads=4, mlp_width=32, image_size=24, classes=0,
        norm_eps=theirs.config.layer_norm_eps,
    ).eval()  # fmt: skip
    state = theirs.state_dict()
    with torch.no_grad():
        ours.class_token.copy_(state["embeddings.cls_token"])
        ours.positions.table.copy_(state["embeddings.position_embeddings"])
        for name, parameter in ours.patches.projection.named_parameters():
            parameter.copy_(state[f"embeddings.patch_embeddings.projection.{name}"])
        kinds = [key for key in state if ".0." in key]
        for i, block in enumerate(ours.blocks):
            for target, source in {
                "attention_norm": "layernorm_before", "mlp_norm": "layernorm_after",
                "attention.query": ("q_proj", "query"), "attention.key": ("k_proj", "key"),
                "attention.value": ("v_proj", "value"),
                "attention.output": ("o_proj", "attention.output.dense"),
                "mlp.up": ("fc1", "intermediate.dense"), "mlp.down": ("fc2", "0.output.dense"),
            }.items():  # fmt: skip
                wanted = (source,) if isinstance(source, str) else source
                for name, parameter in block.get_submodule(target).named_parameters():
                    (key,) = (k for k in kinds if any(k.endswith(f"{w}.{name}") for w in wanted))
                    parameter.copy_(state[key.replace(".0.", f".{i}.")])
    images = pictures(size=(24, 24))
    with vitrail.record(ours) as seen:
        ours(images)
    expected = theirs(images, output_attentions=True).attentions
    for call, weights in zip(seen.values(), expected, strict=True):
        assert (call.weights - weights).abs().max() < 1e-5
    assert (expected[0] - expected[0].mean()).abs().max() > 0.1  # they are not all alike


@pytest.mark.parametrize("fused", [True, False])
def test_timm(fused: bool) -> None:
    """By its kernel and by its own softmax, against the formula on what its projections give."""
    model = timm.models.VisionTransformer(
        img_size=(16, 24), patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=3
    )
    randomise(model)
    model.eval()
    projected = []
    for block in model.blocks:
        assert block.attn.fused_attn
        block.attn.fused_attn = fused
        block.attn.qkv.register_forward_hook(lambda *given: projected.append(given[-1]))
    images = pictures(size=(16, 24))
    plain = model(images)
    with vitrail.record(model) as seen:
        assert same(model(images), plain)
    assert list(seen) == ["blocks.0.attn", "blocks.1.attn"]
    for call, qkv in zip(seen.values(), projected[2:], strict=True):
        q, k, _ = qkv.unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        assert distance(call.weights, (q @ k.mT / 8**0.5).softmax(-1)) < 1e-5
        assert call.weights.shape == (2, 2, 7, 7)
        assert call.grid == (2, 3)
        assert call.special == 1


def causal(length: int) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(length)


@pytest.mark.parametrize("how", ["plain", "padding", "causal", "one example", "cross", "averaged"])
@pytest.mark.parametrize("training", [False, True])
def test_torch_multihead_attention(how: str, training: bool) -> None:
    layer = nn.MultiheadAttention(16, 4, batch_first=True).train(training)
    randomise(layer)
    x = torch.randn(2, 5, 16)
    keys = torch.randn(2, 7, 16) if how == "cross" else x
    given: dict = {}
    if how == "padding":
        given["key_padding_mask"] = torch.arange(5) >= torch.tensor([[5], [3]])
    if how == "causal":
        given = {"attn_mask": causal(5), "is_causal": True}
    if how == "one example":
        x = keys = x[0]
    _, expected = layer(x, keys, keys, average_attn_weights=False, **given)
    with torch.no_grad():
        plain, asked = layer(x, keys, keys, need_weights=how == "averaged", **given)
        with vitrail.record(layer) as seen:
            output, answered = layer(x, keys, keys, need_weights=how == "averaged", **given)
    assert same(output, plain)
    assert (asked is None) == (answered is None) == (how != "averaged")
    (call,) = seen.values()
    expected = expected[None] if how == "one example" else expected
    assert distance(call.weights, expected) < 1e-6
    assert_nothing_left(layer)


class Attention(nn.Module):
    """As vit-pytorch and many others write it: a softmax of their own."""

    def __init__(self, softmax: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.softmax = softmax
        self.to_qkv = nn.Linear(8, 3 * 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.to_qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        weights = self.softmax(q @ k.transpose(-1, -2) * 4**-0.5)
        return (weights @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    "softmax",
    [
        nn.Softmax(dim=-1),
        lambda scores: scores.softmax(dim=-1),
        lambda scores: torch.softmax(scores, -1),
        lambda scores: torch.softmax(input=scores, dim=-1),
        lambda scores: F.softmax(input=scores, dim=-1),
        lambda scores: Tensor.softmax(scores, dim=3),
        lambda scores: F.softmax(scores, dim=-1, dtype=torch.float32),
    ],
)
def test_a_softmax_of_ones_own(softmax: Callable[[Tensor], Tensor]) -> None:
    layer = Attention(softmax)
    model = nn.Sequential(nn.Linear(8, 8), layer, nn.Softmax(-1))
    x = torch.randn(2, 5, 8)
    plain = model(x)
    with vitrail.record(model) as seen:
        assert same(model(x), plain)
    assert list(seen) == ["1"]  # the softmax at the end is no attention
    q, k, _ = layer.to_qkv(model[0](x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    assert distance(seen["1"].weights, (q @ k.mT / 2).softmax(-1)) < 1e-5


@pytest.mark.parametrize("how", ["causal", "mask", "bias", "grouped"])
def test_scaled_dot_product_attention_of_any_kind(how: str) -> None:
    """With values of the identity, what attention gives is its weights."""

    class SelfAttention(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, **how: object) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, **how)  # type: ignore[arg-type]

    layer = SelfAttention()
    heads = 2 if how == "grouped" else 4
    q, k = torch.randn(2, 4, 3, 8), torch.randn(2, heads, 6, 8)
    v = torch.eye(6).expand(2, heads, 6, 6)
    given = {
        "causal": {"is_causal": True, "scale": 0.3},
        "mask": {"attn_mask": torch.rand(3, 6) > 0.3},
        "bias": {"attn_mask": torch.randn(2, 1, 3, 6)},
        "grouped": {"enable_gqa": True},
    }[how]
    with vitrail.record(layer) as seen:
        output = layer(q, k, v, **given)
    (call,) = seen.values()
    assert distance(call.weights, output) < 1e-6


@pytest.mark.parametrize("hard", [False, True])
def test_alignment(hard: bool) -> None:
    layer = AlignmentAttention(AdditiveScore(3, 4, 5), hard=hard)
    s, h = torch.randn(2, 6, 3), torch.randn(2, 7, 4)
    mask = torch.rand(2, 6, 7) > 0.3
    mask[..., 0] = True
    torch.manual_seed(1)
    plain = layer(s, h, mask=mask)
    torch.manual_seed(1)
    with vitrail.record(layer) as seen:
        output = layer(s, h, mask=mask)
    assert same(output.context, plain.context)
    (call,) = seen.values()
    expected = layer.score(s, h).masked_fill(~mask, -torch.inf).softmax(-1)
    assert distance(call.weights, expected[:, None]) < 1e-6


def test_decoding_with_a_cache() -> None:
    layer = MultiHeadAttention(8, 2)
    x = torch.randn(1, 4, 8)
    with torch.no_grad(), vitrail.record(layer, every_call=True) as seen:
        cache = KeyValueCache()
        for token in x.split(1, 1):
            layer(token, causal=True, cache=cache)
    q, k = (projection(x).unflatten(-1, (2, 4)).transpose(1, 2) for projection in (layer.query, layer.key))
    for t, step in enumerate(seen.calls("")):
        expected = (q[:, :, t : t + 1] @ k[:, :, : t + 1].mT / 2).softmax(-1)
        torch.testing.assert_close(step.weights, expected)


class Softmaxes(torch.nn.Module):
    """Attention of somebody else's, by a softmax of its own."""

    def __init__(self, dim: int = -1, after: float = 1.0) -> None:
        super().__init__()
        self.dim, self.after = dim, after

    def forward(self, x: Tensor) -> Tensor:
        weights = (x @ x.mT).softmax(self.dim)
        return weights.mul_(self.after) @ x


def test_a_foreign_softmax_is_kept_as_it_was_and_in_float32() -> None:
    x = torch.randn(2, 3, 5, 4, dtype=torch.bfloat16)
    layer = Softmaxes(after=2.0)
    with vitrail.record(torch.nn.ModuleDict({"a": layer}), "a") as seen:
        layer(x)
    assert seen["a"].weights.dtype == torch.float32
    # bfloat16 has 8 bits: a row of 5 is off by at most 5 halves of 2**-8
    assert (seen["a"].weights.sum(-1) - 1).abs().max() < 5 * 2**-9


def test_a_softmax_over_queries_is_no_attention_weight() -> None:
    layer = Softmaxes(dim=-2)
    with pytest.warns(UserWarning, match="nothing was seen of a"):  # noqa: SIM117
        with vitrail.record(torch.nn.ModuleDict({"a": layer}), "a") as seen:
            layer(torch.randn(2, 3, 5, 4))
    assert not seen


def test_a_backward_that_runs_layers_again_is_no_second_call() -> None:
    from torch.utils.checkpoint import checkpoint

    layer = MultiHeadAttention(12, 3)
    holder = torch.nn.ModuleDict({"a": layer})
    with vitrail.record(holder, "a", every_call=True) as seen:
        y = checkpoint(layer, torch.randn(2, 5, 12, requires_grad=True), use_reentrant=False)
        y.sum().backward()
    assert len(seen.calls("a")) == 1


class GatedAttention(nn.Module):
    """Attention, then a mixture of three experts, with a softmax of its own over them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.gate = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
        early = self.gate(x).softmax(-1)
        if self.how == "kernel":
            mixed = F.scaled_dot_product_attention(heads, heads, heads)
        elif self.how == "one matrix for all heads":
            flat = heads.flatten(0, 1)
            mixed = (torch.bmm(flat, flat.mT) / 2).softmax(-1).bmm(flat).view_as(heads)
        else:
            mixed = (heads @ heads.mT / 2).softmax(-1) @ heads
        late = self.gate(x).softmax(-1)
        return mixed.transpose(1, 2).flatten(2) * (early + late).sum(-1, keepdim=True)


@pytest.mark.parametrize("every_call", [False, True])
@pytest.mark.parametrize("how", ["kernel", "softmax", "one matrix for all heads"])
def test_a_gate_is_no_attention(how: str, every_call: bool) -> None:
    layer, x = GatedAttention(how), torch.randn(2, 5, 8)
    plain = layer(x)
    with vitrail.record(layer, every_call=every_call) as seen:
        assert same(layer(x), plain)
        assert same(layer(x), plain)
    assert len(seen.calls("")) == 1 + every_call
    heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
    for call in seen.calls(""):
        assert distance(call.weights.view(2, 2, 5, 5), (heads @ heads.mT / 2).softmax(-1)) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_torchs_attention_in_half_precision_is_seen_in_float32(dtype: torch.dtype) -> None:
    layer = nn.MultiheadAttention(16, 4, batch_first=True).eval()
    x = torch.randn(2, 5, 16)
    _, expected = layer(x, x, x, average_attn_weights=False)
    layer.to(dtype)
    x = x.to(dtype)
    plain, _ = layer(x, x, x)
    with vitrail.record(layer) as seen:
        output, _ = layer(x, x, x)
    assert same(output, plain)
    assert seen[""].weights.dtype == torch.float32
    assert distance(seen[""].weights, expected) < 2e-2
    # The sum of five roundings to half precision would be off by up to 5 halves of its unit.
    assert (seen[""].weights.sum(-1) - 1).abs().max() < 1e-6


@pytest.mark.parametrize("need_weights", [False, True])
def test_torchs_queries_that_may_look_nowhere_give_zeros(need_weights: bool) -> None:
    layer = nn.MultiheadAttention(16, 4, batch_first=True).eval()
    x = torch.randn(2, 5, 16)
    mask = torch.zeros(5, 5, dtype=torch.bool)
    mask[2] = True  # torch: True may not look
    with vitrail.record(layer) as seen:
        layer(x, x, x, attn_mask=mask, need_weights=need_weights)
    sums = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0]).expand(2, 4, 5)
    torch.testing.assert_close(seen[""].weights.sum(-1), sums)


@pytest.mark.parametrize(
    "layer",
    [
        MultiHeadAttention(8, 2),
        nn.MultiheadAttention(8, 2, batch_first=True).eval(),
        Attention(nn.Softmax(-1)),
    ],
)
def test_models_without_data(layer: nn.Module) -> None:
    layer, x = layer.to("meta"), torch.randn(1, 3, 8, device="meta")
    with vitrail.record(layer) as seen:
        layer(*[x] * (3 if isinstance(layer, nn.MultiheadAttention) else 1))
    assert seen[-1].weights.shape == (1, 2, 3, 3)
    assert seen[-1].weights.is_meta


def test_a_compiled_function_inside_a_layer_stays_in_one_piece() -> None:
    torch.compiler.reset()

    @torch.compile(backend="eager", fullgraph=True)
    def attention(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x) * 2

    class SelfAttention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return attention(x) + (x @ x.mT).softmax(-1) @ x

    layer, x = SelfAttention(), torch.randn(2, 3, 5, 4)
    plain = layer(x)
    with vitrail.record(layer):
        assert same(layer(x), plain)


def test_a_scripted_part_is_passed_over() -> None:
    """It takes no hooks; what lies beside it is seen, and keeps none."""
    model = nn.Sequential(MultiHeadAttention(8, 2), torch.jit.script(nn.Linear(8, 8)))
    with vitrail.record(model) as seen:
        model(torch.randn(1, 3, 8))
    assert list(seen) == ["0"]
    assert_nothing_left(model[0])


@pytest.mark.parametrize("corner", ["upper_left", "lower_right"])
def test_torchs_own_causal_bias(corner: str) -> None:
    """An object without a matrix of its own; by hand: the triangle that its name tells of."""
    from torch.nn.attention import bias

    class Attention(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, k, getattr(bias, f"causal_{corner}")(3, 5))

    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8)
    layer = Attention()
    with vitrail.record(layer) as seen:
        layer(q, k)
    triangle = torch.ones(3, 5, dtype=torch.bool).tril(0 if corner == "upper_left" else 2)
    expected = (q @ k.mT / 8**0.5).masked_fill(~triangle, -torch.inf).softmax(-1)
    assert distance(seen[""].weights, expected) < 1e-5


def test_selective_checkpointing_counts_nothing_of_the_looking() -> None:
    """It keeps some results by the number of their operation, and takes them in that order again."""
    from functools import partial

    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    # As wide as three times the model, so that a wrong result would fit.
    layer = nn.TransformerEncoderLayer(8, 2, 24, dropout=0.0, batch_first=True)
    x = torch.randn(2, 4, 8)
    keep = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])

    def gradients() -> list[Tensor]:
        layer.zero_grad()
        checkpoint(layer, x, use_reentrant=False, context_fn=keep).square().sum().backward()
        return [parameter.grad.clone() for parameter in layer.parameters()]

    expected = gradients()
    with vitrail.record(layer) as seen:
        found = gradients()
    assert seen["self_attn"].weights.shape == (2, 2, 4, 4)
    assert all(map(same, found, expected))
