"""Grids are given where they are certain, and nowhere else."""

import pytest
import torch
from torch import Tensor, nn

import vitrail
from judges import timm, transformers
from looking import HEADS, LAYERS, pictures, small
from vitrail.attention import MultiHeadAttention
from vitrail.tokens import Patches


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


TOWER = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32,
    "image_size": 24, "patch_size": 8,
}  # fmt: skip


def grids_of(model: nn.Module, size: tuple[int, int] = (24, 24), **given: Tensor) -> set[tuple]:
    """(keys, grid, special tokens) of every layer that has run."""
    with torch.no_grad(), vitrail.record(model.eval()) as seen:
        model(torch.randn(1, 3, *size), **given)
    return {(call.weights.shape[-1], call.grid, call.special) for call in seen.values()}


@pytest.mark.parametrize(
    ("family", "changes", "special"),
    [
        ("ViT", {}, 1),
        ("DeiT", {}, 2),
        ("Dinov2WithRegisters", {"num_register_tokens": 4}, 5),
        ("Beit", {}, 1),
        ("SiglipVision", {}, 0),
        ("CLIPVision", {}, 1),
    ],
)
def test_patches_behind_what_their_families_put_before_them(family: str, changes: dict, special: int) -> None:
    config = getattr(transformers, f"{family}Config")(**TOWER, **changes)
    model = getattr(transformers, f"{family}Model")(config)
    assert grids_of(model) == {(9 + special, (3, 3), special)}


def test_text_beside_pictures_has_no_grid() -> None:
    text = {key: TOWER[key] for key in list(TOWER)[:4]}
    config = transformers.CLIPConfig(
        vision_config=TOWER, text_config=text | {"vocab_size": 99, "eos_token_id": 98}, projection_dim=8
    )
    model = transformers.CLIPModel(config).eval()
    with torch.no_grad(), vitrail.record(model) as seen:
        model(input_ids=torch.randint(0, 98, (1, 10)), pixel_values=torch.randn(1, 3, 24, 24))
    assert len(seen) == 4
    for name, call in seen.items():
        assert call.weights.shape[-1] == 10
        assert call.grid == ((3, 3) if name.startswith("vision_model") else None)


def test_tokens_behind_the_patches_leave_no_certain_grid() -> None:
    """YOLOS: a class token, the patches, and then the tokens that detect."""
    config = transformers.YolosConfig(**TOWER | {"image_size": (24, 24)}, num_detection_tokens=5)
    assert grids_of(transformers.YolosModel(config)) == {(15, None, 0)}


def test_patches_that_are_left_out_leave_no_certain_grid() -> None:
    model = transformers.ViTMAEModel(transformers.ViTMAEConfig(**TOWER, mask_ratio=0.75))
    assert grids_of(model) == {(3, None, 0)}


def test_windows_have_no_grid() -> None:
    config = transformers.SwinConfig(
        embed_dim=8, depths=[1], num_heads=[2], window_size=4, image_size=32, patch_size=4
    )
    assert grids_of(transformers.SwinModel(config), (32, 32)) == {(16, None, 0)}


def test_a_hybrids_grid_is_that_of_its_last_convolution() -> None:
    backbone = timm.create_model("resnet10t", features_only=True)
    model = timm.models.VisionTransformer(
        img_size=64, patch_size=1, embed_dim=12, depth=1, num_heads=2, num_classes=0, dynamic_img_size=True,
        embed_layer=lambda **how: timm.layers.HybridEmbed(backbone, **how),
    )  # fmt: skip
    assert grids_of(model, (64, 96)) == {(7, (2, 3), 1)}


def test_keys_on_a_coarser_grid_than_queries() -> None:
    """SegFormer reduces keys by a convolution of each layer's own: by 4, 2 and not at all."""
    config = transformers.SegformerConfig(
        num_encoder_blocks=3, depths=[1] * 3, hidden_sizes=[8] * 3, num_attention_heads=[1] * 3,
        sr_ratios=[4, 2, 1], strides=[4, 2, 2], patch_sizes=[7, 3, 3], mlp_ratios=[2] * 3,
    )  # fmt: skip
    assert grids_of(transformers.SegformerModel(config), (64, 96)) == {(24, (4, 6), 0)}


def test_words_after_pictures_have_no_grid() -> None:
    """More of them than there are patches, and yet no patch among them."""

    class Captioner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = Patches(3, 8, (6, 6))
            self.attention = MultiHeadAttention(8, 2)

        def forward(self, images: Tensor) -> Tensor:
            self.patches(images)
            return self.attention(torch.randn(len(images), 10, 8))

    assert grids_of(Captioner(), (12, 12)) == {(10, None, 0)}
