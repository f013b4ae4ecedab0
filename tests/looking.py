"""A small ViT whose attention is known by hand, and what looking must not leave behind."""

import torch
from torch import Tensor, nn

import vitrail
from compare import randomise
from judges import transformers
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


def transformers_vit(implementation: str) -> nn.Module:
    torch.manual_seed(5)
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32,
        image_size=24, patch_size=8, attn_implementation=implementation,
    )  # fmt: skip
    model = transformers.ViTModel(config)
    randomise(model)
    return model.eval()
