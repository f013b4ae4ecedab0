"""torch.compile takes every model whole, once for all batch sizes, watched or not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import vitrail
from compare import distance, randomise, same, with_inductor
from vitrail.models import Model

OPTIONS: list[dict[str, Any]] = [
    {},
    {"stem": "conv", "pool": "mean", "class_token": False},
    {"stem": "resnet", "resnet_units": (1, 1), "patch": 16, "pool": "class+mean"},
    {"pool": "attention", "positions": "sincos"},
    {"distillation_token": True, "registers": 2, "qk_norm": True, "layer_scale": 0.1},
    {"mlp": "swiglu", "representation": 8, "norm_after_pool": True},
]


def small(**options: Any) -> Model:
    fields = {
        "width": 32, "depth": 1, "heads": 2, "mlp_width": 48, "image_size": 32, "classes": 5,
    }  # fmt: skip
    model = vitrail.create("vit-ti/8", **fields | options)
    randomise(model)
    return model.eval()


class Counting:
    """A compiler that changes nothing, and counts the graphs that it is handed."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


def pictures(batch: int) -> Tensor:
    """Their number may change from call to call; mark_dynamic raises where the code would fix it."""
    images = torch.randn(batch, 3, 32, 32)
    torch._dynamo.mark_dynamic(images, 0)
    return images


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> None:
    torch.compiler.reset()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_one_graph_for_all_batch_sizes(options: dict[str, Any]) -> None:
    """No break (fullgraph), no second graph for a second batch size, nor after it was watched."""
    model, compiler = small(**options), Counting()
    fast = torch.compile(model, fullgraph=True, backend=compiler)
    batches = [pictures(n) for n in (2, 5, 3)]
    with torch.no_grad():
        expected = [model(images) for images in batches]
        with vitrail.record(fast) as before:
            first = fast(batches[0])
        second = fast(batches[1])
        with vitrail.record(fast) as after:
            third = fast(batches[2])
    assert compiler.graphs == 1
    for found, wanted in zip((first, second, third), expected, strict=True):
        assert same(found, wanted)
    assert list(before) == list(after)
    for seen, images in ((before, batches[0]), (after, batches[2])):
        with vitrail.record(model) as plain:
            model(images)
        for name in plain:
            assert distance(seen[name].weights, plain[name].weights) < 1e-6


def test_training_is_one_graph() -> None:
    """Forward and backward, with everything that is random in training."""
    random = {"drop_path": 0.1, "dropout": 0.1, "attention_dropout": 0.1}
    model = small(distillation_token=True, depth=2, **random).train()
    compiler = Counting()
    fast = torch.compile(model, fullgraph=True, backend=compiler)
    for batch in (2, 3):
        fast(pictures(batch)).sum().backward()
    assert compiler.graphs == 1
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_all_sizes_dynamic_need_no_marks() -> None:
    compiler = Counting()
    fast = torch.compile(small(), fullgraph=True, dynamic=True, backend=compiler)
    for batch in (2, 7):
        fast(torch.randn(batch, 3, 32, 32))
    assert compiler.graphs == 1


def test_without_dynamic_a_second_batch_size_is_a_second_graph() -> None:
    """The counting above counts."""
    compiler = Counting()
    fast = torch.compile(small(), fullgraph=True, dynamic=False, backend=compiler)
    for batch in (2, 3):
        fast(torch.randn(batch, 3, 32, 32))
    assert compiler.graphs == 2


@with_inductor
def test_the_real_compiler() -> None:
    """Inductor, for two batch sizes: as near as rounding lets it be."""
    model = small()
    fast = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        for batch in (2, 5):
            images = pictures(batch)
            assert distance(fast(images), model(images)) < 1e-5
            with torch.compiler.set_stance("fail_on_recompile"), vitrail.record(fast) as seen:
                fast(images)
            assert seen["blocks.0.attention"].weights.shape == (batch, 2, 17, 17)


@pytest.mark.parametrize("rule", ["bicubic-antialias", "bicubic", "bicubic-corners", "bilinear-corners"])
def test_training_at_sizes_that_change(rule: str) -> None:
    """Gradients of stretched positions, compiled with every size dynamic, are those of plain torch."""
    model = small(position_resize=rule, image_size=16).train()
    fast = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for height, width in ((32, 48), (24, 40)):
        images = torch.randn(2, 3, height, width)
        gradients = []
        for run in (fast, model):
            model.zero_grad()
            run(images).square().sum().backward()
            gradients.append(model.positions.table.grad)
        assert distance(*gradients) < 1e-5
