"""vitrail.record: which layers it sees, and that nobody notices."""

import gc
import threading
from collections.abc import Callable
from importlib import import_module

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import vitrail
from compare import distance, disturbed, same
from looking import DEPTH, HEADS, LAYERS, assert_nothing_left, by_hand, pictures, small, transformers_vit
from vitrail.attention import (
    MultiHeadAttention,
)
from vitrail.look import attention_layers


def test_the_weights_of_every_layer() -> None:
    model, images = small(), pictures()
    with vitrail.record(model) as seen:
        model(images)
    assert list(seen) == LAYERS
    for name, expected in zip(LAYERS, by_hand(model, images), strict=True):
        call = seen[name]
        assert call.name == name
        assert call.weights.shape == (2, HEADS, 16, 16)
        assert not call.weights.requires_grad
        assert distance(call.weights, expected) < 1e-5
        with disturbed(model.blocks[0].attention.query.weight):
            moved = by_hand(model, images)
        assert distance(call.weights, moved[LAYERS.index(name)]) > 1e-4
    assert_nothing_left(model)


def test_the_forward_stays_on_the_fused_kernel() -> None:
    model, images = small(), pictures()
    with torch.profiler.profile() as profile, vitrail.record(model):
        model(images)
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls["aten::_scaled_dot_product_flash_attention_for_cpu"] == DEPTH


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("changes", [
    {}, {"attention_dropout": 0.3, "dropout": 0.2, "drop_path": 0.3}, {"pool": "attention"},
    {"stem": "conv", "qk_norm": True}, {"distillation_token": True, "registers": 2},
], ids=str)  # fmt: skip
def test_nobody_notices(changes: dict, training: bool) -> None:
    """Bit for bit: output, gradients, batch statistics, and the random numbers after it."""
    results = []
    for look in (False, True):
        torch.manual_seed(1)
        model = small(**changes).train(training)
        images = pictures()
        with vitrail.record(model) if look else torch.enable_grad():
            output = model(images)
        output.square().sum().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        results.append([output, *gradients, *model.buffers(), torch.get_rng_state()])
    for left, right in zip(*results, strict=True):
        assert same(left, right)


@pytest.mark.parametrize(
    ("layers", "numbers"),
    [
        (None, [0, 1, 2]),
        ("blocks.1.attention", [1]),
        ("blocks.[02].attention", [0, 2]),
        ("*", [0, 1, 2]),
        (0, [0]),
        (-1, [2]),
        ([2, 0], [0, 2]),  # in the order of the model
        ([-1, "blocks.2.attention"], [2]),
        (["blocks.0.*", 1], [0, 1]),
        ((), []),
        (np.int64(-1), [2]),
        (np.array([0, 2]), [0, 2]),
    ],
    ids=str,
)
def test_only_chosen_layers_are_held(layers: object, numbers: list[int]) -> None:
    model = small()
    with vitrail.record(model, layers) as seen:  # type: ignore[arg-type]
        model(pictures())
    assert list(seen) == [LAYERS[i] for i in numbers]
    assert len(seen) == len(numbers)


@pytest.mark.parametrize("layers", [0, -2, None])
def test_only_chosen_layers_take_memory(layers: int | None) -> None:
    """Tensors of the weights' shape that are alive after the forward: one for each chosen layer."""
    model, images = small(), pictures(batch=3)
    with vitrail.record(model, layers):
        model(images)
        gc.collect()
        alive = [
            thing
            for thing in gc.get_objects()
            if issubclass(type(thing), Tensor) and thing.shape == (3, HEADS, 16, 16)
        ]
        assert len(alive) == (DEPTH if layers is None else 1)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("blocks.7.attention", "no layer is called 'blocks.7.attention'; did you mean 'blocks."),
        ("nonesuch*", r"no layer is called 'nonesuch\*'; expected one of: blocks.0.attention"),
        (3, "layer 3 is out of range: there are 3"),
        (-4, "layer -4 is out of range"),
        (["blocks.0.attention", "blocks.9"], "'blocks.9'"),
    ],
)
def test_unknown_layers_are_refused(layers: object, message: str) -> None:
    model = small()
    with pytest.raises(ValueError, match=message), vitrail.record(model, layers):  # type: ignore[arg-type]
        pass
    assert_nothing_left(model)


def test_a_model_without_attention_is_refused() -> None:
    with (
        pytest.raises(ValueError, match=r"Linear has no module.*say which"),
        vitrail.record(nn.Linear(2, 2)),
    ):
        pass


def test_nested() -> None:
    model, images = small(), pictures()
    plain = model(images)
    with vitrail.record(model) as outer:
        model(images)
        with vitrail.record(model, 1) as inner:
            output = model(2 * images)
        model(3 * images)
    assert same(output, model(2 * images))
    assert same(plain, model(images))
    assert list(outer) == LAYERS
    assert list(inner) == LAYERS[1:2]
    for seen, times in ((inner, 2), (outer, 3)):
        expected = by_hand(model, times * images)[1]
        assert distance(seen[LAYERS[1]].weights, expected) < 1e-5
    assert_nothing_left(model)


def test_a_chosen_layer_inside_a_chosen_layer() -> None:
    """Both see it: a whole block holds the attention that happens inside."""
    model = small()
    with vitrail.record(model, ["blocks.1", "blocks.1.attention"], every_call=True) as seen:
        model(pictures())
    assert list(seen) == ["blocks.1", "blocks.1.attention"]
    assert [len(seen.calls(name)) for name in seen] == [1, 1]
    assert same(seen["blocks.1"].weights, seen["blocks.1.attention"].weights)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["forward", "hook"])
def test_a_forward_that_raises(where: str, error: type[BaseException]) -> None:
    """Layers before it stay recorded; no hook and no mode stays on, whatever was raised and where."""
    model = small()

    def fail(*_: object) -> None:
        raise error("in the middle")

    if where == "forward":
        model.blocks[1].attention.output.forward = fail
    else:
        handle = model.blocks[1].attention.register_forward_pre_hook(fail)
    with pytest.raises(error, match="in the middle"), vitrail.record(model) as seen:
        model(pictures())
    # The second layer's weights were known before it failed in its last step, or never.
    assert list(seen) == LAYERS[: 2 if where == "forward" else 1]
    if where == "hook":
        handle.remove()
    assert_nothing_left(model)


def test_an_error_in_the_context_ends_it_too() -> None:
    model = small()
    with pytest.raises(ZeroDivisionError), vitrail.record(model):
        _ = 1 / 0
    assert_nothing_left(model)


def test_not_looking_costs_nothing() -> None:
    """Nothing of torch's hook and mode machinery is in use outside the context."""
    model = small()
    assert_nothing_left(model)
    with vitrail.record(model):
        model(pictures())
        assert any(module._forward_hooks for module in model.modules())
        assert torch._C._len_torch_function_stack() == 0  # on while a layer runs, not between
    assert_nothing_left(model)
    assert not torch.overrides.has_torch_function((pictures(),))


def test_other_threads_are_not_recorded() -> None:
    model, images = small(), pictures()
    expected = model(images)
    outputs = []
    with vitrail.record(model) as seen:
        worker = threading.Thread(target=lambda: outputs.append(model(images)))
        worker.start()
        worker.join()
        assert len(seen) == 0
        model(2 * images)
    assert same(outputs[0], expected)
    assert distance(seen[LAYERS[0]].weights, by_hand(model, 2 * images)[0]) < 1e-5


@pytest.mark.parametrize("kind", ["open", "closed"])
def test_two_threads_each_have_their_own_recording(kind: str) -> None:
    """They begin and end one after the other, not one inside the other."""
    model: nn.Module = MultiHeadAttention(8, 2)
    if kind == "closed":
        model = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    inputs = [torch.randn(1, 4, 8), torch.randn(1, 4, 8)]
    expected = []
    for x in inputs:
        with vitrail.record(model) as seen:
            model(x, x, x)
        expected.append(seen[""].weights)
    found: dict[int, Tensor] = {}
    steps = threading.Barrier(2)

    def look(number: int) -> None:
        x = inputs[number]
        steps.wait()
        if number == 1:
            steps.wait()
        with vitrail.record(model) as seen:
            if number == 0:
                steps.wait()
            steps.wait()
            for _ in range(5):
                model(x, x, x)
            steps.wait()
            if number == 1:
                steps.wait()  # the first to come has gone
        if number == 0:
            steps.wait()
        found[number] = seen[""].weights

    workers = [threading.Thread(target=look, args=(number,)) for number in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert_nothing_left(model)
    for number in range(2):
        assert distance(found[number], expected[number]) < 1e-6


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (lambda: small(), LAYERS),
        (lambda: transformers_vit("sdpa"), [f"layers.{i}.attention" for i in range(2)]),
        (lambda: nn.TransformerEncoderLayer(4, 2), ["self_attn"]),
    ],
)
def test_layers_are_found(model: Callable[[], nn.Module], names: list[str]) -> None:
    """The innermost modules that are named for attention: not what wraps them, not what they are made of."""
    assert list(attention_layers(model())) == names


class Holder(nn.Module):
    """A module whose own part is called `module`, as wrappers call what they wrap."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.module = part

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


@pytest.mark.parametrize(
    ("wrap", "name"),
    [
        (Holder, "module"),
        (lambda part: Holder(Holder(part)), "module.module"),
        (nn.DataParallel, ""),
        (lambda part: nn.DataParallel(Holder(part)), "module"),
        (lambda part: Holder(nn.DataParallel(part)), "module"),
        (lambda part: torch.compile(Holder(part), backend="eager"), "module"),
        (lambda part: Holder(torch.compile(part, backend="eager")), "module"),
    ],
)
def test_only_wrappers_do_not_show_in_names(wrap: Callable[[nn.Module], nn.Module], name: str) -> None:
    model = wrap(MultiHeadAttention(8, 2))
    assert list(attention_layers(model)) == [name]
    with torch.no_grad(), vitrail.record(model, name) as seen:
        model(torch.randn(1, 3, 8))
    assert list(seen) == [name]


def test_a_layer_in_two_places_has_one_name() -> None:
    layer = MultiHeadAttention(8, 2)
    assert list(attention_layers(nn.Sequential(layer, layer))) == ["0"]


@pytest.mark.parametrize("layers", [None, "1", ["0", "1"]])
def test_layers_that_never_ran_are_told_of(layers: object) -> None:
    model = nn.Sequential(MultiHeadAttention(8, 2), MultiHeadAttention(8, 2))
    expected = pytest.warns(UserWarning, match=r"nothing was seen of (0, )?1: did it run")
    with expected, vitrail.record(model, layers):  # type: ignore[arg-type]
        pass


def test_of_all_layers_some_may_rest() -> None:
    """Half of CLIP is called at a time; only who asks for a layer by name is told that it did not run."""
    model = nn.Sequential(MultiHeadAttention(8, 2), MultiHeadAttention(8, 2))
    with vitrail.record(model) as seen:
        model[0](torch.randn(1, 3, 8))
    assert list(seen) == ["0"]


@pytest.mark.parametrize("kind", ["open", "closed"])
def test_what_fails_in_looking_fails_no_forward(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> Tensor:
        raise ZeroDivisionError("in looking")

    monkeypatch.setattr(import_module("vitrail.look.taps"), "attention_weights", broken)
    layer = MultiHeadAttention(8, 2)
    model = layer if kind == "open" else torch.compile(layer, backend="eager")
    x = torch.randn(1, 3, 8)
    plain = model(x)
    with pytest.warns(UserWarning, match="ZeroDivisionError: in looking"), vitrail.record(model):
        assert same(model(x), plain)
