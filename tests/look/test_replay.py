"""Parts that run twice: compiled ones, and torch's own Transformer modules."""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import vitrail
from compare import distance, randomise, same, with_inductor
from judges import torchvision, transformers
from looking import DEPTH, LAYERS, assert_nothing_left, by_hand, pictures, small
from vitrail.attention import (
    KeyValueCache,
    MultiHeadAttention,
)


def test_nested_around_torchs_own_attention() -> None:
    """Two recordings that look alike are not the same: the inner one ends, and the outer goes on."""
    layer = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x, y = torch.randn(2, 1, 4, 8)
    with torch.no_grad(), vitrail.record(layer, every_call=True) as outer:
        with vitrail.record(layer, every_call=True) as inner:
            layer(x, x, x)
        layer(y, y, y)
    assert len(inner.calls("")) == 1
    assert len(outer.calls("")) == 2
    assert same(inner[""].weights, outer.calls("")[0].weights)
    assert not same(inner[""].weights, outer[""].weights)
    assert_nothing_left(layer)


def compiled_whole(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="aot_eager")  # type: ignore[return-value]


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="aot_eager")
    return model


def compiled_blocks(model: nn.Module) -> nn.Module:
    for i, block in enumerate(model.blocks):  # type: ignore[arg-type]
        model.blocks[i] = torch.compile(block, backend="aot_eager")  # type: ignore[index]
    return model


def compiled_blocks_in_place(model: nn.Module) -> nn.Module:
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile(backend="aot_eager")
    return model


def compiled_patches(model: nn.Module) -> nn.Module:
    model.patches = torch.compile(model.patches, backend="aot_eager")  # type: ignore[assignment]
    return model


def compiled_forward(model: nn.Module) -> nn.Module:
    model.forward = torch.compile(model.forward, backend="aot_eager")  # type: ignore[method-assign]
    return model


def compiled_features(model: nn.Module) -> nn.Module:
    model.features = torch.compile(model.features, backend="aot_eager")  # type: ignore[assignment, arg-type]
    return model


def compiled_forward_of_blocks(model: nn.Module) -> nn.Module:
    for block in model.blocks:  # type: ignore[union-attr]
        compiled_forward(block)
    return model


@pytest.fixture(scope="module")
def one_process() -> Iterator[None]:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    yield
    torch.distributed.destroy_process_group()


def distributed(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def distributed_and_compiled(model: nn.Module) -> nn.Module:
    return compiled_whole(distributed(model))


def compiled_and_distributed(model: nn.Module) -> nn.Module:
    return distributed(compiled_whole(model))


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("wrap", [
    compiled_whole, compiled_in_place, compiled_blocks, compiled_blocks_in_place, compiled_patches,
    compiled_forward, compiled_features, compiled_forward_of_blocks,
    distributed, distributed_and_compiled, compiled_and_distributed,
])  # fmt: skip
def test_compiled_and_wrapped(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """Same names, same weights, the wrapped model's own output bit for bit, and nothing compiled anew."""
    torch.compiler.reset()
    model, images = small(), pictures()
    expected = by_hand(model, images)
    wrapped = wrap(model)
    attributes = [set(vars(module)) for module in wrapped.modules()]
    with torch.no_grad():
        before = wrapped(images)
        with torch.compiler.set_stance("fail_on_recompile"):
            with vitrail.record(wrapped) as seen, vitrail.record(wrapped, -1) as last:
                during = wrapped(images)
            after = wrapped(images)
    assert same(before, during)
    assert same(before, after)
    assert list(seen) == LAYERS
    assert list(last) == LAYERS[-1:]
    for name, weights in zip(LAYERS, expected, strict=True):
        assert distance(seen[name].weights, weights) < 1e-5
        assert seen[name].grid == (3, 5)
    assert attributes == [set(vars(module)) for module in wrapped.modules()]
    for module in wrapped.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_compiled_parts_without_a_chosen_layer_run_once() -> None:
    torch.compiler.reset()
    model = compiled_blocks_in_place(small())
    runs = []
    for block in model.blocks:  # type: ignore[union-attr]
        block.mlp.register_forward_hook(lambda block, *_: runs.append(block))
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), vitrail.record(model, 1):
        model(pictures())
    first, second, third = (block.mlp for block in model.blocks)  # type: ignore[union-attr]
    assert runs == [first, second, second, third]


@with_inductor
def test_inductors_output_is_kept() -> None:
    """The compiler that rounds otherwise: what comes out is its answer, not the uncompiled one."""
    torch.compiler.reset()
    model, images = small(depth=1), pictures()
    fast = torch.compile(model)
    with torch.no_grad():
        before = fast(images)
        with vitrail.record(fast) as seen:
            during = fast(images)
    assert same(before, during)
    assert distance(seen[LAYERS[0]].weights, by_hand(model, images)[0]) < 1e-5


def test_a_compiled_call_changes_the_world_once() -> None:
    """Batch statistics, random numbers, caches and inputs are as after one call, not two."""

    class Busy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.attention = MultiHeadAttention(4, 2, dropout=0.5)

        def forward(self, x: Tensor, cache: KeyValueCache) -> Tensor:
            x.add_(1.0)
            return self.attention(self.norm(x.mT).mT, causal=True, cache=cache)

    results = []
    for look in (False, True):
        torch.manual_seed(3)
        torch.compiler.reset()
        model = torch.compile(Busy(), backend="eager")
        x, cache = torch.randn(2, 3, 4), KeyValueCache()
        with torch.no_grad(), vitrail.record(model) if look else torch.no_grad():
            output = model(x, cache)
        results.append([output, x, *cache.kept, *model.buffers(), torch.get_rng_state()])
        assert cache.length == 3
    for left, right in zip(*results, strict=True):
        assert same(left, right)


def test_compiled_models_in_other_threads_are_not_recorded() -> None:
    torch.compiler.reset()
    model, images = compiled_whole(small()), pictures()
    with torch.no_grad():
        model(images)
    with vitrail.record(model) as seen:
        worker = threading.Thread(target=torch.no_grad()(lambda: model(images)))
        worker.start()
        worker.join()
        assert len(seen) == 0
        model(images)
    assert len(seen) == DEPTH


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_torchvision(training: bool, grad: bool) -> None:
    """Its attention leaves torch's fast path when watched; its answer must not."""
    model = torchvision.models.VisionTransformer(
        image_size=16, patch_size=8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32
    )
    randomise(model)
    model.train(training)
    images = pictures(size=(16, 16))
    with torch.set_grad_enabled(grad):
        plain = model(images)
        with vitrail.record(model) as seen:
            output = model(images)
        assert same(output, plain)
    layers = [layer.self_attention for layer in model.encoder.layers]
    inputs = {}
    for layer in layers:
        layer.register_forward_pre_hook(lambda layer, args: inputs.update({layer: args}))
    model(images)
    for call, layer in zip(seen.values(), layers, strict=True):
        _, expected = nn.MultiheadAttention.forward(layer, *inputs[layer], average_attn_weights=False)
        assert distance(call.weights, expected) < 1e-5
        assert call.grid == (2, 2)
        layer._forward_pre_hooks.clear()
    assert_nothing_left(model)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_torch_transformer_encoder(training: bool, padded: bool) -> None:
    """In eval it is one fused call, on nested tensors where there is padding; in training it is not."""
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.2)
    model = nn.TransformerEncoder(layer, 2)
    randomise(model)
    model.train(training)
    x = torch.randn(2, 5, 16)
    padding = torch.arange(5) >= torch.tensor([[5], [3]]) if padded else None
    with torch.no_grad():
        torch.manual_seed(0)
        plain = model(x, src_key_padding_mask=padding)
        torch.manual_seed(0)
        with vitrail.record(model) as seen:
            output = model(x, src_key_padding_mask=padding)
    assert same(output, plain)
    assert list(seen) == ["layers.0.self_attn", "layers.1.self_attn"]
    first = model.layers[0].self_attn.eval()
    _, expected = first(x, x, x, key_padding_mask=padding, average_attn_weights=False)
    assert distance(seen["layers.0.self_attn"].weights, expected) < 1e-6
    assert_nothing_left(model)


@pytest.mark.parametrize("training", [False, True])
def test_torch_attention_inside_a_chosen_layer(training: bool) -> None:
    """A whole layer is chosen by name, and the attention inside still takes its own path."""
    model = nn.Sequential(nn.Linear(16, 16), nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True))
    randomise(model)
    outer = nn.ModuleDict({"encoder": model})
    model.train(training)
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        plain = model(x)
        with vitrail.record(outer, "encoder") as seen:
            assert same(model(x), plain)
    assert seen["encoder"].weights.shape == (2, 4, 5, 5)
    assert_nothing_left(outer)


def test_looking_copies_what_has_gradients() -> None:
    """A cache of a compiled layer that holds the middle of a graph."""
    from vitrail.attention import KeyValueCache

    layer = MultiHeadAttention(12, 3)
    x = torch.randn(1, 5, 12)
    answers = []
    for looking in (False, True):
        compiled, cache = torch.compile(layer, backend="eager"), KeyValueCache()
        compiled(x[:, :2], cache=cache)
        with vitrail.record(compiled) if looking else nullcontext():
            answers.append(compiled(x[:, 2:], cache=cache))
        assert cache.length == 5
    assert same(*answers)


class Remembering(nn.Module):
    """Attention between norms with buffers, which counts its calls and keeps what it saw, in many ways."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.attention = MultiHeadAttention(4, 2)
        self.register_buffer("shift", torch.ones(4))
        self.register_buffer("same_shift", self.shift)
        self.calls = 0
        self.log: list[int] = []
        self.kept = torch.zeros(4)
        self.cache = KeyValueCache()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.log.append(self.calls)
        self.kept += 1
        self.cache.extend(self.kept[None, None], self.kept[None, None])
        y = self.norm(x.mT).mT * self.shift
        y = self.attention(y) * self.same_shift
        with torch.no_grad():
            self.kept *= 2
        return y


@pytest.mark.parametrize("training", [False, True])
def test_a_backward_through_a_part_with_buffers(training: bool) -> None:
    """Gradients and all that the part remembers are as without looking, while one still looks."""
    results = []
    for look in (False, True):
        torch.manual_seed(4)
        torch.compiler.reset()
        part = Remembering().train(training)
        model = torch.compile(part, backend="eager")
        x = torch.randn(2, 3, 4, requires_grad=True)
        with vitrail.record(model) if look else nullcontext() as seen:
            output = model(x) + model(2 * x)
            output.square().sum().backward()
        if look:
            assert seen["attention"].weights.shape == (2, 2, 3, 3)
        gradients = [x.grad, *(parameter.grad for parameter in part.parameters())]
        assert part.calls == 2
        assert part.log == [1, 2]
        assert part.cache.length == 2
        assert part.shift is part.same_shift
        results.append([output, *gradients, *part.buffers(), part.kept, *part.cache.kept])
    for left, right in zip(*results, strict=True):
        assert same(left, right)


def test_a_checkpointed_compiled_part_is_seen_once() -> None:
    from torch.utils.checkpoint import checkpoint

    torch.compiler.reset()
    part = torch.compile(MultiHeadAttention(12, 3), backend="eager")
    with vitrail.record(part, every_call=True) as seen:
        y = checkpoint(part, torch.randn(2, 5, 12, requires_grad=True), use_reentrant=False)
        y.sum().backward()
    assert len(seen.calls("")) == 1


def test_recordings_of_a_part_and_of_what_it_is_in() -> None:
    """The inner one replays the encoder's layers, the outer one the encoder: each sees each call once."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2).eval()
    model = nn.Sequential(nn.Sequential(*encoder.layers))
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        plain = model(x)
        for first, second in ((None, "0"), ("0", None)):
            with (
                vitrail.record(model, first, every_call=True) as outer,
                vitrail.record(model, second, every_call=True) as inner,
            ):
                assert same(model(x), plain)
            by_layer, whole = (outer, inner) if first is None else (inner, outer)
            assert [len(by_layer.calls(name)) for name in by_layer] == [1, 1]
            assert len(whole.calls("0")) == 2
            for one, same_one in zip(whole.calls("0"), by_layer.values(), strict=True):
                assert distance(one.weights, same_one.weights) < 1e-6
    assert_nothing_left(model)


class Decoder(nn.Module):
    """Reads the output object of an encoder, as the models of transformers do, and writes into it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(8, 2)

    def forward(self, encoded: Any) -> Any:
        encoded.last_hidden_state.add_(1)
        y = self.attention(encoded.last_hidden_state) + encoded[0] + encoded.hidden_states[1]
        return type(encoded)(last_hidden_state=y, hidden_states=encoded.hidden_states)


def test_output_objects_go_in_and_out() -> None:
    torch.compiler.reset()
    kind = transformers.modeling_outputs.BaseModelOutput
    x = torch.randn(1, 3, 8)
    answers = []
    for look in (False, True):
        torch.manual_seed(1)
        model = torch.compile(Decoder(), backend="eager")
        given = kind(last_hidden_state=x.clone(), hidden_states=(x, 2 * x))
        with torch.no_grad(), vitrail.record(model) if look else nullcontext() as seen:
            answer = model(given)
        assert type(answer) is kind
        answers.append([answer.last_hidden_state, given.last_hidden_state, *given.hidden_states])
    assert list(seen) == ["attention"]
    for left, right in zip(*answers, strict=True):
        assert same(left, right)


class Node:
    """An object within itself, which holds what cannot be copied."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.lock = threading.Lock()
        self.others: list = [self, (self, {"me": self})]


def test_inputs_within_themselves() -> None:
    class SelfAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = MultiHeadAttention(8, 2)

        def forward(self, node: Node, again: list) -> Tensor:
            assert node.others[0] is node is node.others[1][1]["me"]
            assert again[0] is again
            assert again[1] is node
            with node.lock:
                node.x.add_(1)
            return self.attention(node.x)

    model = torch.compile(SelfAttention(), backend="eager")
    x = torch.randn(1, 3, 8)
    node = Node(x.clone())
    again: list = [node]
    again.insert(0, again)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), vitrail.record(model) as seen:
        output = model(node, again)
    assert same(node.x, x + 1)
    assert same(output, model._orig_mod.attention(x + 1))
    assert list(seen) == ["attention"]


def test_autocast_keeps_nothing_of_the_looking() -> None:
    """Older torch would keep what it casts without gradients, and give it to those who need them."""
    kept = []

    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            kept.append(torch.is_autocast_cache_enabled())
            return self.attention(x, x, x)[0]

    model = nn.Sequential(Casting()).eval()
    with torch.autocast("cpu", torch.bfloat16), vitrail.record(model, "0"):
        model(torch.randn(2, 4, 8))
    assert kept == [True, False]
    assert torch.is_autocast_cache_enabled()


def test_looking_draws_nothing() -> None:
    """Python's and NumPy's random numbers, as layers that are dropped at random use."""

    class Drawing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.drawn: list[float] = []

        def forward(self, x: Tensor) -> Tensor:
            self.drawn += [random.random(), np.random.rand()]
            return self.attention(x, x, x)[0]

    drawing = Drawing()
    model = nn.Sequential(drawing).eval()
    x = torch.randn(1, 3, 8)
    drawn = []
    for looks in (False, True):
        random.seed(0)
        np.random.seed(0)
        with torch.no_grad(), vitrail.record(model, "0") if looks else nullcontext():
            model(x)
            model(x)
        drawn.append(drawing.drawn[:])
        drawing.drawn.clear()
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 4
