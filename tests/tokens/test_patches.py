"""Patches: a strided convolution, which is a linear map of flattened patches."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from compare import distance, disturbed, same
from judges import timm
from vitrail.tokens import ConvolutionalStem, Grid, Patches


@pytest.mark.parametrize(
    ("patch", "size"),
    [((4, 4), (8, 12)), ((3, 5), (9, 10)), ((7, 7), (7, 7)), ((1, 1), (2, 3))],
    ids=str,
)
def test_unfold_and_linear(patch: tuple[int, int], size: tuple[int, int]) -> None:
    """As deck 003 and the ViT paper tell it: cut into P x P x C numbers, flatten, multiply by E."""
    ours = Patches(3, 10, patch).double()
    images = torch.randn(2, 3, *size, dtype=torch.float64)
    rows, columns = size[0] // patch[0], size[1] // patch[1]
    cut = [
        images[:, :, r * patch[0] : (r + 1) * patch[0], c * patch[1] : (c + 1) * patch[1]].flatten(1)
        for r in range(rows)
        for c in range(columns)
    ]
    matrix, bias = ours.projection.weight.flatten(1), ours.projection.bias
    expected = torch.stack(cut, 1) @ matrix.T + bias
    found = ours(images)
    assert found.grid == Grid(rows, columns)
    assert distance(found.values, expected) < 1e-12
    unfolded = F.unfold(images, patch, stride=patch).mT
    assert distance(found.values, F.linear(unfolded, matrix, bias)) < 1e-12
    with disturbed(ours.projection.weight):
        assert distance(ours(images).values, expected) > 1e-3


@pytest.mark.parametrize("size", [(30, 45), (16, 17), (1, 1), (47, 32)], ids=str)
def test_what_patches_do_not_fill_is_padded_as_timm_pads_it(size: tuple[int, int]) -> None:
    ours = Patches(3, 8, (16, 16))
    judge = timm.layers.PatchEmbed(
        img_size=None, patch_size=16, in_chans=3, embed_dim=8, dynamic_img_pad=True
    )
    judge.proj.load_state_dict(ours.projection.state_dict())
    images = torch.randn(2, 3, *size)
    found = ours(images)
    assert same(found.values, judge(images))
    assert found.grid == judge.dynamic_feat_size(size) == (-(-size[0] // 16), -(-size[1] // 16))


def test_a_stem_works_on_the_images_and_patches_on_its_features() -> None:
    """A stem 4 times coarser leaves a 2x2 convolution of patches of 8; padding is the images'."""
    stem = nn.Sequential(nn.Conv2d(3, 5, 4, stride=4), nn.Tanh())
    ours = Patches(5, 6, (8, 8), stem=stem, stem_stride=4)
    assert ours.projection.kernel_size == ours.projection.stride == (2, 2)
    images = torch.randn(2, 3, 21, 40)
    found = ours(images)
    features = stem(F.pad(images, (0, 0, 0, 3)))
    assert found.grid == (3, 5)
    torch.testing.assert_close(found.values, ours.projection(features).flatten(2).mT)


def test_patches_finer_than_the_stem_are_refused() -> None:
    for patch in [(8, 6), (6, 8), (2, 2)]:
        with pytest.raises(ValueError, match=f"4 times coarser.*got {patch[0]}x{patch[1]}"):
            Patches(3, 8, patch, stem=nn.Identity(), stem_stride=4)


@pytest.mark.parametrize("stride", [2, 4, 8, 16])
def test_a_convolutional_stem_halves_the_image_and_doubles_the_channels(stride: int) -> None:
    stem = ConvolutionalStem(3, 32, stride)
    convolutions = [layer for layer in stem if isinstance(layer, nn.Conv2d)]
    widths = [layer.out_channels for layer in convolutions]
    assert widths == [32 // stride * 2 ** (step + 1) for step in range(len(widths))]
    assert 2 ** len(widths) == stride
    assert {(layer.kernel_size, layer.stride) for layer in convolutions} == {((3, 3), (2, 2))}
    size = (3 * stride, 2 * stride)
    assert stem(torch.randn(2, 3, *size)).shape == (2, 32, 3, 2)


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_convolutional_stem_overlaps(overlaps: bool) -> None:
    """A pixel at a corner reaches its own token through patches, and its neighbours by the stem."""
    patches = Patches(3, 64, (8, 8))
    if overlaps:
        patches = Patches(64, 64, (8, 8), stem=ConvolutionalStem(3, 64, 8), stem_stride=8)
    patches.double().eval()
    images = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    before = patches(images).values[0]
    images[0, :, 15, 15] += 10.0  # the last pixel of token (1, 1)
    reached = (patches(images).values[0] != before).any(-1).view(4, 4)
    expected = torch.zeros(4, 4, dtype=torch.bool)
    expected[1, 1] = True
    if overlaps:
        expected[1:3, 1:3] = True
    assert torch.equal(reached, expected)


@pytest.mark.parametrize("stride", [0, 1, 3, 12])
def test_a_stride_that_is_no_power_of_two_is_refused(stride: int) -> None:
    with pytest.raises(ValueError, match=f"stride {stride} is no power of 2"):
        ConvolutionalStem(3, 32, stride)


def test_a_width_that_does_not_halve_often_enough_is_refused() -> None:
    with pytest.raises(ValueError, match="width 20 is not a multiple of 8"):
        ConvolutionalStem(3, 20, 16)
