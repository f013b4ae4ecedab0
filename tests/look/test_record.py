"""vitrail.record: what it sees, in whose models, and that nobody notices."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vitrail
from compare import distance, disturbed, randomise, same
from judges import timm, torchvision, transformers
from vitrail.attention import (
    AdditiveScore,
    AlignmentAttention,
    KeyValueCache,
    MultiHeadAttention,
    attention_weights,
    backend,
)
from vitrail.look import attention_layers
from vitrail.models import Model

DEPTH, HEADS = 3, 2
LAYERS = [f"blocks.{i}.attention" for i in range(DEPTH)]


def small(**changes: object) -> Model:
    """A ViT of three blocks whose weights are large enough to make attention uneven."""
    fields = {
        "width": 16, "depth": DEPTH, "heads": HEADS, "mlp_width": 32,
        "image_size": (12, 20), "classes": 5,
    }  # fmt: skip
    model = vitrail.create("vit-ti/4", **fields | changes)
    randomise(model)
    return model.eval()


def pictures(batch: int = 2, size: tuple[int, int] = (12, 20)) -> Tensor:
    return torch.randn(batch, 3, *size)


def by_hand(model: Model, images: Tensor) -> list[Tensor]:
    """The weights of every block of a plain ViT, from its parts, without the recorder."""
    tokens, grid = model.patches(images)
    x = model._with_special_tokens(tokens, grid)
    found = []
    for block in model.blocks:
        layer, normed = block.attention, block.attention_norm(x)
        q, k = (
            projection(normed).unflatten(-1, (layer.heads, -1)).transpose(1, 2)
            for projection in (layer.query, layer.key)
        )
        found.append((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1))
        x = block(x)
    return found


def assert_nothing_left(model: nn.Module) -> None:
    """No hook on any module, no mode, no attribute that shadows a method."""
    for module in model.modules():
        for hooks in (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._forward_hooks_always_called,
            module._forward_hooks_with_kwargs,
        ):
            assert not hooks
        assert "_compiled_call_impl" not in vars(module)
    assert torch._C._len_torch_function_stack() == 0
    assert torch.backends.mha.get_fastpath_enabled()


# --- What it sees ---


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


@pytest.mark.parametrize("name", ["fused", "math", "explicit", "matmul"])
def test_whatever_the_backend(name: str) -> None:
    model, images = small(), pictures()
    with vitrail.record(model) as expected:
        model(images)
    with backend(name), vitrail.record(model) as seen:
        output = model(images)
    with backend(name):
        assert same(model(images), output)
    for layer in LAYERS:
        assert distance(seen[layer].weights, expected[layer].weights) < 1e-5


@pytest.mark.parametrize(
    ("changes", "special"),
    [
        ({}, 1),
        ({"class_token": False, "pool": "mean"}, 0),
        ({"registers": 4}, 5),
        ({"distillation_token": True}, 2),
        ({"distillation_token": True, "registers": 3}, 5),
    ],
    ids=str,
)
def test_grid_and_map(changes: dict, special: int) -> None:
    """Not the size of creation, not square, not a multiple of the patch: 9 x 27 pixels are 3 x 7."""
    model = small(**changes)
    with vitrail.record(model, -1) as seen:
        model(pictures(size=(9, 27)))
    call = seen[LAYERS[-1]]
    assert call.grid == (3, 7)
    assert call.special == special
    assert call.weights.shape[-2:] == (special + 21, special + 21)
    for query in (0, special + 4):
        drawn = call.map(query)
        assert drawn.shape == (2, HEADS, 3, 7)
        for row in range(3):
            for column in range(7):
                key = special + 7 * row + column
                assert torch.equal(drawn[:, :, row, column], call.weights[:, :, query, key])
    average = sum(call.map(query) for query in range(21)) / 21
    expected = call.map(0) if special else average
    torch.testing.assert_close(call.map(), expected)


def test_every_size_has_its_own_grid() -> None:
    model = small()
    with vitrail.record(model, 0, every_call=True) as seen:
        model(pictures(size=(12, 20)))
        model(pictures(size=(24, 8)))
    assert [call.grid for call in seen.calls(LAYERS[0])] == [(3, 5), (6, 2)]


def test_attention_pooling_looks_at_the_grid_too() -> None:
    model = small(pool="attention")
    with vitrail.record(model) as seen:
        model(pictures())
    name = "attention_pooling.attention"
    assert list(seen) == [*LAYERS, name]
    assert seen[name].weights.shape == (2, HEADS, 1, 15)  # special tokens are left out of it
    assert seen[name].map().shape == (2, HEADS, 3, 5)


# --- Which layers ---


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


def test_only_the_last_call_is_kept_unless_asked() -> None:
    model, name = small(), LAYERS[0]
    with vitrail.record(model, 0) as last:
        model(pictures())
        first = weakref.ref(last[name].weights)
        model(pictures(batch=3))
    gc.collect()
    assert first() is None
    assert [len(call.weights) for call in last.calls(name)] == [3]
    with vitrail.record(model, 0, every_call=True) as every:
        model(pictures())
        model(pictures(batch=3))
    assert [len(call.weights) for call in every.calls(name)] == [2, 3]
    assert every[name] is every.calls(name)[-1]


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


def test_asking_for_what_was_not_recorded() -> None:
    model = small()
    with vitrail.record(model, 0) as seen:
        with pytest.raises(KeyError, match="is watched but has not run"):
            seen[LAYERS[0]]
        model(pictures())
    with pytest.raises(KeyError, match=r"'blocks.1.attention' is not watched; did you mean"):
        seen["blocks.1.attention"]


def test_tokens_without_a_grid_have_no_map() -> None:
    layer = MultiHeadAttention(8, 2)
    with vitrail.record(layer) as seen:
        layer(torch.randn(1, 3, 8))
    (call,) = seen.values()
    assert call.grid is None
    with pytest.raises(ValueError, match=r"do not lie on a grid; use .weights"):
        call.map()


# --- When and where ---


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


# --- Compiled and wrapped ---


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


# --- Anyone's model ---


def transformers_vit(implementation: str) -> nn.Module:
    torch.manual_seed(5)
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32,
        image_size=24, patch_size=8, attn_implementation=implementation,
    )  # fmt: skip
    model = transformers.ViTModel(config)
    randomise(model)
    return model.eval()


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


def test_timm_fused_and_explicit() -> None:
    model = timm.models.VisionTransformer(
        img_size=(16, 24), patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=3
    )
    randomise(model)
    model.eval()
    images = pictures(size=(16, 24))
    plain = model(images)
    with vitrail.record(model) as fused:
        output = model(images)
    assert same(output, plain)
    for block in model.blocks:
        assert block.attn.fused_attn
        block.attn.fused_attn = False
    with vitrail.record(model) as explicit:
        model(images)
    assert list(fused) == list(explicit) == ["blocks.0.attn", "blocks.1.attn"]
    for name in fused:
        assert fused[name].weights.shape == (2, 2, 7, 7)
        assert distance(fused[name].weights, explicit[name].weights) < 1e-5
        assert fused[name].grid == (2, 3)
        assert fused[name].special == 1


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
    assert distance(seen["1"].weights, attention_weights(q, k)) < 1e-5


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
        whole = layer(x, causal=True)
        cache = KeyValueCache()
        for token in x.split(1, 1):
            layer(token, causal=True, cache=cache)
    first, *steps = seen.calls("")
    assert whole.shape == x.shape
    for t, step in enumerate(steps):
        assert step.weights.shape == (1, 2, 1, t + 1)
        torch.testing.assert_close(step.weights[:, :, 0], first.weights[:, :, t, : t + 1])


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


def test_what_was_seen_says_so() -> None:
    model = vitrail.create("vit-ti/16", depth=2, image_size=(32, 48)).eval()
    with vitrail.record(model) as seen:
        assert "nothing" in repr(seen)
        model(torch.randn(1, 3, 32, 48))
    assert repr(seen).count("\n") == 1
    assert "blocks.1.attention" in repr(seen[-1])
    assert "(1, 3, 7, 7)" in repr(seen[-1])
    with pytest.raises(ValueError, match="out of range"):
        seen[-1].map(7)
