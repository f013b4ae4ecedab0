"""Gradients of every parameter, against the libraries that the weights come from, in float64.

The judge's gradients are written over its own weights and saved by its own means; read by vitrail.load
they come back under our names, and must equal ours.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vitrail
from compare import disturbed, randomise
from judges import timm, torchvision, transformers

Save = Callable[[nn.Module, Path], Path]
SHAPE = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 80}


def save_timm(model: nn.Module, place: Path) -> Path:
    timm.models.save_for_hf(model, place, safe_serialization=True)
    return place


def save_transformers(model: Any, place: Path) -> Path:
    model.save_pretrained(place)
    return place


def save_torchvision(model: nn.Module, place: Path) -> Path:
    place.mkdir()
    torch.save(model.state_dict(), place / "model.pth")
    return place / "model.pth"


def of_timm(name: str, **changes: Any) -> tuple[nn.Module, Save]:
    small = {
        "embed_dim": 48,
        "depth": 2,
        "num_heads": 3,
        "num_classes": 5,
        "img_size": (21, 35),
        "patch_size": 7,
    }
    return timm.create_model(name, **{**small, **changes}), save_timm


def of_transformers(kind: str, **changes: Any) -> tuple[nn.Module, Save]:
    config = getattr(transformers, f"{kind}Config")(
        **{**SHAPE, "image_size": (24, 40), "patch_size": 8, "num_labels": 5, **changes}
    )
    return getattr(transformers, f"{kind}ForImageClassification")(config), save_transformers


def of_torchvision() -> tuple[nn.Module, Save]:
    judge = torchvision.models.VisionTransformer(32, 8, 2, 3, 48, 80, num_classes=5)
    return judge, save_torchvision


JUDGES: dict[str, Callable[[], tuple[nn.Module, Save]]] = {
    "timm: 3 heads, patch 7, not square, no qkv bias, qk norm, layer scale": lambda: of_timm(
        "vit_tiny_patch16_224", qkv_bias=False, qk_norm=True, init_values=0.1
    ),
    "timm: registers without positions, mean": lambda: of_timm("vit_medium_patch16_reg4_gap_256"),
    "timm: attention pooling": lambda: of_timm("vit_base_patch16_siglip_224"),
    "timm: two heads of DeiT": lambda: of_timm("deit_tiny_distilled_patch16_224"),
    "transformers: ViT": lambda: of_transformers("ViT", qkv_bias=False),
    "transformers: DINOv2 with registers": lambda: of_transformers(
        "Dinov2WithRegisters", image_size=24, num_register_tokens=3, mlp_ratio=2
    ),
    "torchvision": of_torchvision,
}


def gradients(model: nn.Module, images: Tensor, answer: Callable[[Any], Tensor]) -> None:
    logits = answer(model(images))
    weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)
    (logits * weights).sum().backward()


@pytest.mark.parametrize("case", JUDGES)
@pytest.mark.filterwarnings("ignore::vitrail.weights.LoadWarning")
def test_gradients_of_every_parameter(case: str, tmp_path: Path) -> None:
    judge, save = JUDGES[case]()
    judge = judge.double().eval()
    randomise(judge)
    more = {"heads": 3} if case == "torchvision" else {}
    ours = vitrail.load(save(judge, tmp_path / "weights"), **more)
    images = torch.randn(2, 3, *ours.config.image_size, dtype=torch.float64)

    gradients(judge, images, lambda output: getattr(output, "logits", output))
    gradients(ours, images, lambda output: output)
    with torch.no_grad():
        for parameter in judge.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    theirs = vitrail.load(save(judge, tmp_path / "gradients"), **more).state_dict()

    # Some gradients are zero but for rounding (softmax does not see a bias of the keys): nothing is
    # compared more finely than a millionth of the greatest.
    least = 1e-6 * max(tensor.abs().max() for tensor in theirs.values())

    def apart(name: str, gradient: Tensor) -> float:
        difference = (gradient - theirs[name]).abs().max()
        return float(difference / theirs[name].abs().max().clamp_min(least))

    parameters = dict(ours.named_parameters())
    assert set(parameters) == set(theirs)
    for name, parameter in parameters.items():
        assert parameter.grad is not None, name
        assert apart(name, parameter.grad) < 1e-9, name

    for parameter in parameters.values():
        parameter.grad = None
    with disturbed(ours.blocks[0].mlp.up.weight):
        gradients(ours, images, lambda output: output)
    unequal = [name for name, p in parameters.items() if apart(name, p.grad) > 1e-9]
    assert len(unequal) > len(parameters) / 2
