"""On a GPU what the CPU gives: attention by every backend, recording, training."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import vitrail
from compare import distance, randomise, same
from vitrail.attention import attend, backend
from vitrail.learn.train import train

DEVICES = [kind for kind in ("cuda", "mps") if getattr(torch, kind).is_available()]
pytestmark = pytest.mark.skipif(not DEVICES, reason="needs a GPU that torch knows (CUDA, Apple)")

# What each backend can take, by kind of device: half precision alone, masks and biases.
EVERYWHERE = ("fused", "math", "explicit", "matmul")
ONLY_CUDA = ("efficient", "flash", "cudnn")
ONLY_HALF = ("flash", "cudnn")
CASES: dict[str, Callable[[str], dict[str, object]]] = {
    "plain": lambda device: {},
    "causal": lambda device: {"causal": True},
    "masked, a row blind": lambda device: {"mask": some_mask().to(device)},
    "biased": lambda device: {"bias": torch.linspace(-1, 1, 40 * 40, device=device).view(1, 1, 40, 40)},
}


@pytest.fixture(params=DEVICES or ["no GPU"])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def some_mask() -> Tensor:
    mask = torch.rand(2, 3, 40, 40, generator=torch.Generator().manual_seed(1)) < 0.7
    mask[0, 0, 3] = False
    return mask


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*EVERYWHERE, *ONLY_CUDA])
def test_attention_and_its_gradients(device: str, name: str, dtype: torch.dtype, case: str) -> None:
    if name in ONLY_CUDA and device != "cuda":
        pytest.skip(f"{name} is of CUDA")
    if name in ONLY_HALF and (dtype == torch.float32 or "ed" in case):
        pytest.skip(f"{name} takes half precision, and neither masks nor biases")
    q, k, v, up = torch.randn(4, 2, 3, 40, 32).to(dtype)

    def answers(device: str, dtype: torch.dtype, kind: str) -> list[Tensor]:
        inputs = [x.to(device, dtype).requires_grad_() for x in (q, k, v)]
        with backend(kind):
            y = attend(*inputs, **CASES[case](device))
            y.backward(up.to(device, dtype))
        return [x.detach().cpu() for x in (y, *(x.grad for x in inputs))]

    near = 1e-5 if dtype == torch.float32 else 2e-2
    exact = answers("cpu", torch.float64, "explicit")
    for ours, truth in zip(answers(device, dtype, name), exact, strict=True):
        assert distance(ours, truth) < near
    assert distance(exact[0] * (1 + 2 * near), exact[0]) > near


def test_a_model_and_what_is_seen_of_it(device: str) -> None:
    model = vitrail.create(
        "vit-ti/4", width=32, depth=2, heads=2, mlp_width=64, image_size=16, classes=5
    ).eval()
    randomise(model)
    images = torch.randn(2, 3, 16, 24)
    with torch.no_grad(), vitrail.record(model) as here:
        expected = model(images)
    model.to(device)
    with torch.no_grad():
        plain = model(images.to(device))
        with vitrail.record(model) as there:
            watched = model(images.to(device))
    assert same(plain, watched)
    assert distance(plain.cpu(), expected) < 1e-4
    for name, call in here.items():
        assert distance(there[name].weights.cpu(), call.weights) < 1e-4


def test_compiled_at_any_batch_size(device: str) -> None:
    model = vitrail.create("vit-ti/4", width=32, depth=2, heads=2, mlp_width=64, image_size=16)
    randomise(model.eval().to(device))
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for batch in (2, 5):
        images = torch.randn(batch, 3, 16, 16, device=device)
        with torch.no_grad():
            assert distance(compiled(images), model(images)) < 1e-4


def test_cudnns_kernel_must_be_asked_for(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device != "cuda":
        pytest.skip("it is of CUDA")
    on: list[bool] = []

    def spy(q: Tensor, *args: object, **kwargs: object) -> Tensor:
        on.append(torch.backends.cuda.cudnn_sdp_enabled())
        return q

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    q = torch.randn(1, 1, 8, 8, device=device)
    attend(q, q, q)
    with backend("cudnn"):
        attend(q, q, q)
    assert on == [False, True]


def test_training_and_going_on(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """train takes CUDA by itself where there is one."""
    monkeypatch.chdir(tmp_path)
    words = ["model.width=48", "model.depth=2", "model.heads=2", "model.mlp_width=96", "epochs=3"]
    folder = train(None, words)
    assert folder is not None
    first = vitrail.load(folder / "best")
    train(None, ["epochs=4"], resume=True)
    assert (folder / "report.html").is_file()
    assert not same(first.head.weight, vitrail.load(folder / "last").head.weight)
