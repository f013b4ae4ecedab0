"""Variations are those of torchvision, where it has them; the rest is arithmetic on chosen draws."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from judges import torchvision
from vitrail.data.augment import COLOURS, COLUMNS, MOVES, OPERATIONS, Augment, warp

PLAIN = {"scale": (1.0, 1.0), "ratio": (1.0, 1.0), "flip": 0.0, "layers": 0, "erase": 0.0}


def judge():
    return torchvision.transforms.functional


def noise(*shape):
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8))


def smooth(size, channels=3):
    """A picture without sharp edges, of which interpolation loses nothing to speak of."""
    rows, columns = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    waves = [
        127 + 100 * torch.sin(rows / (6 + c) + 1) * torch.cos(columns / (9 - c)) for c in range(channels)
    ]
    return torch.stack(waves).round().byte()[None]


def vary(settings, pixels, size=None, aspect=1.0, operations=(), **draws):
    """One picture, with draws of a half but where another is chosen, and these operations.

    operations: (name, direction) for each layer, direction 0 or 1.
    """
    row = [draws.get(name, 0.5) for name in COLUMNS]
    for name, direction in operations:
        row += [(OPERATIONS.index(name) + 0.5) / len(OPERATIONS), 0.75 if direction else 0.25]
    settings = Augment(**PLAIN | settings | {"layers": len(operations)})
    aspect = torch.full((len(pixels),), aspect)
    return settings(pixels, torch.tensor([row] * len(pixels)), size or tuple(pixels.shape[2:]), aspect)


def close(ours, theirs, within=0.01):
    assert ours.shape == theirs.shape
    assert (ours - theirs.float()).abs().max() <= within


@pytest.mark.parametrize("shape", [(2, 3, 9, 6), (2, 1, 8, 8)])
def test_nothing_changes_nothing(shape):
    close(vary({}, noise(*shape), aspect=shape[3] / shape[2]), noise(*shape))


def test_flip():
    pixels = noise(1, 3, 9, 6)
    for flip, draw, turned in ((1.0, 0.99, True), (0.5, 0.49, True), (0.5, 0.51, False), (0.0, 0.0, False)):
        expected = pixels.flip(3) if turned else pixels
        close(vary({"flip": flip}, pixels, aspect=6 / 9, flip=draw), expected)


@pytest.mark.parametrize(("x", "y"), [(0, 0), (2, 2), (4, 4), (0, 3), (4, 1)])
def test_pad_and_crop(x, y):
    pixels = noise(2, 1, 7, 9)
    padded = np.pad(pixels.numpy(), ((0, 0), (0, 0), (2, 2), (2, 2)), mode="symmetric")
    ours = vary({"pad_crop": 2}, pixels, aspect=9 / 7, x=(x + 0.5) / 5, y=(y + 0.5) / 5)
    close(ours, torch.from_numpy(padded[:, :, y : y + 7, x : x + 9]))


@pytest.mark.parametrize(("x", "y", "left", "top"), [(0, 0, 0, 0), (1, 0, 20, 0), (0.25, 0.5, 5, 10)])
def test_crop(x, y, left, top):
    # a quarter of 40 x 40 is 20 x 20, which may begin at 0 to 20
    pixels = noise(1, 3, 40, 40)
    ours = vary({"scale": (0.25, 0.25)}, pixels, size=(20, 20), x=x, y=y)
    close(ours, pixels[:, :, top : top + 20, left : left + 20])


def test_a_crop_keeps_the_ratio_of_a_stretched_picture():
    # The picture was twice as wide as high, and is kept square: half of it is a square over its whole
    # height, and two thirds of it at 3 : 4 do not fit: 1 x 3/4 is what does, its width 3/8 of the whole.
    pixels = smooth(80)
    resize = judge().resize
    for settings, columns, size in (
        ({"scale": (0.5, 0.5)}, 40, (80, 80)),
        ({"scale": (2 / 3, 2 / 3), "ratio": (3 / 4, 3 / 4)}, 30, (80, 80)),
        ({"scale": (0.25, 0.25)}, 40, (40, 80)),  # 2 : 1, all of the width; a quarter is half of each side
    ):
        ours = vary(settings, pixels, size=size, aspect=2.0, x=0.0, y=0.0)
        rows = 40 if size == (40, 80) else 80
        theirs = resize(pixels[:, :, :rows, :columns].float(), list(size), antialias=False)
        close(ours[:, :, :-4, :-4], theirs[:, :, :-4, :-4], within=0.5)


def test_draws_choose_area_and_ratio():
    settings = Augment(scale=(0.2, 0.6), ratio=(0.5, 2.0), flip=0.0, layers=0)
    draws = {name: torch.tensor([0.0, 0.5, 1.0]) for name in COLUMNS}
    still = dict.fromkeys(MOVES, torch.zeros(3))
    maps = settings.map(draws, still, (10, 10), torch.ones(3))
    wide, tall = maps[:, 0, 0], maps[:, 1, 1]
    torch.testing.assert_close(wide * tall, torch.tensor([0.2, 0.4, 0.5]))  # 0.6 at 2 : 1 would not fit
    torch.testing.assert_close(wide / tall, torch.tensor([0.5, 1.0, 2.0]))


@pytest.mark.parametrize("direction", [0, 1])
@pytest.mark.parametrize("size", [(61, 61), (61, 41)])
@pytest.mark.parametrize("name", ["rotate", "shear_x", "shear_y"])
def test_turned_and_sheared_as_torchvision_does(name, direction, size):
    pixels = judge().resize(smooth(61), list(size))
    sign = 1 if direction else -1
    ours = vary({"magnitude": 0.5}, pixels, aspect=size[1] / size[0], operations=[(name, direction)])
    slope = sign * math.degrees(math.atan(0.5 * 0.3))
    theirs = judge().affine(
        pixels.float(),
        angle=-15 * sign if name == "rotate" else 0,
        translate=[0, 0],
        scale=1.0,
        shear=[slope * (name == "shear_x"), slope * (name == "shear_y")],
        interpolation=torchvision.transforms.InterpolationMode.BILINEAR,
    )
    inner = (..., slice(15, -15), slice(10, -10))  # what comes from within the picture
    close(ours[inner], theirs[inner], within=1.0)
    assert (ours[inner] - pixels[inner]).abs().max() > 5  # it did move


@pytest.mark.parametrize(("name", "dimension"), [("shift_x", 3), ("shift_y", 2)])
@pytest.mark.parametrize("direction", [0, 1])
def test_shifted(name, dimension, direction):
    pixels = noise(1, 3, 40, 60)
    side = pixels.shape[dimension]
    by = 12 if direction else -12
    ours = vary({"magnitude": 331 / 150 * 12 / side}, pixels, aspect=1.5, operations=[(name, direction)])
    inner = (..., slice(12, -12), slice(12, -12))
    close(ours[inner], pixels.roll(-by, dimension)[inner], within=0.1)


def test_moves_of_several_layers_add_up():
    pixels = smooth(61)
    twice = vary({"magnitude": 0.25}, pixels, operations=[("rotate", 1), ("rotate", 1)])
    close(twice, vary({"magnitude": 0.5}, pixels, operations=[("rotate", 1)]), within=0.01)
    undone = vary({"magnitude": 0.25}, pixels, operations=[("shear_x", 1), ("shear_x", 0)])
    close(undone, pixels)


# torchvision's, of uint8, or of floats from 0 to 1 for those that it rounds on the way
EXACT = {
    "posterize": lambda x, a: judge().posterize(x, 8 - round(4 * abs(a))),
    "solarize": lambda x, a: judge().solarize(x, 255 * (1 - abs(a))),
    "equalize": lambda x, a: judge().equalize(x),
}
SMOOTH = {
    "brightness": lambda x, a: judge().adjust_brightness(x, 1 + 0.9 * a),
    "colour": lambda x, a: judge().adjust_saturation(x, 1 + 0.9 * a),
    "contrast": lambda x, a: judge().adjust_contrast(x, 1 + 0.9 * a),
    "sharpness": lambda x, a: judge().adjust_sharpness(x, 1 + 0.9 * a),
    "autocontrast": lambda x, a: judge().autocontrast(x),
}


@pytest.mark.parametrize("amount", [-1.0, -0.3, 0.25, 0.8])
@pytest.mark.parametrize("name", list(COLOURS))
def test_colours_as_torchvision_changes_them(name, amount):
    dark = noise(2, 3, 41, 33) // 3 + 20  # 41 x 33: several pixels for each of 256 values
    skewed = (noise(2, 3, 41, 33).float() ** 2 / 255).byte()
    flat = torch.full_like(dark, 90)
    amounts = torch.full((2, 1, 1, 1), amount)
    for pixels in (dark, skewed, flat, dark[:, :1]):
        ours = COLOURS[name](pixels.float(), amounts)
        if name in EXACT:
            close(ours, EXACT[name](pixels, amount), within=0)
        else:
            close(ours, SMOOTH[name](pixels / 255, amount) * 255, within=0.05)  # their luma sums to 0.9999


@pytest.mark.parametrize("name", list(COLOURS))
def test_each_picture_has_its_own_strength(name):
    pixels = (noise(3, 3, 11, 8) // 2 + 30).float()
    amounts = torch.tensor([-0.6, 0.0, 0.9])[:, None, None, None]
    together = COLOURS[name](pixels, amounts)
    for i in range(3):
        torch.testing.assert_close(together[i : i + 1], COLOURS[name](pixels[i : i + 1], amounts[i : i + 1]))


def test_operations_follow_each_other():
    pixels = noise(2, 3, 9, 9)
    amount = torch.full((2, 1, 1, 1), 0.5)
    ours = vary({"magnitude": 0.5}, pixels, operations=[("solarize", 1), ("brightness", 0)])
    expected = COLOURS["brightness"](COLOURS["solarize"](pixels.float(), amount), -amount)
    close(ours, expected)
    swapped = COLOURS["solarize"](COLOURS["brightness"](pixels.float(), -amount), amount)
    assert (ours - swapped).abs().max() > 10


@pytest.mark.parametrize(
    # a tenth of 20 x 30 at 1 : 1 of its sides: 6.3 and 9.5 pixels; the far corner at 14, 21 (20 - 6, 30 - 9)
    ("x", "y", "left", "top"),
    [(0.0, 0.0, 0, 0), (0.999, 0.999, 21, 14), (0.5, 0.0, 11, 0)],
)
@pytest.mark.parametrize("channels", [1, 3])
def test_erasing(x, y, left, top, channels):
    pixels = noise(1, channels, 20, 30)
    chosen = {"erase": 0.1, "erase_area": (0.1 - 0.02) / (1 / 3 - 0.02), "erase_ratio": 0.5}
    colours = {"red": 0.2, "green": 0.4, "blue": 0.8}
    ours = vary({"erase": 0.2}, pixels, aspect=1.5, erase_x=x, erase_y=y, **chosen, **colours)
    expected = pixels.clone().float()
    paint = torch.tensor([51.0, 102.0, 204.0])[:channels, None, None]
    expected[0, :, top : top + 6, left : left + 9] = paint
    close(ours, expected)
    close(vary({"erase": 0.09}, pixels, aspect=1.5, **chosen, **colours), pixels)


def test_as_often_as_asked():
    settings = Augment(**PLAIN | {"flip": 0.3, "erase": 0.2})
    pixels = torch.zeros(4000, 1, 4, 4, dtype=torch.uint8)
    pixels[..., :2] = 255
    drawn = settings.draw(4000, torch.Generator().manual_seed(0))
    images = settings(pixels, drawn, (4, 4), torch.ones(4000))
    flipped = (images == pixels.flip(3)).flatten(1).all(1)
    erased = ~flipped & (images != pixels).flatten(1).any(1)
    assert abs(flipped.float().mean() - 0.3 * 0.8) < 0.03
    assert abs(erased.float().mean() - 0.2) < 0.03


@given(
    st.integers(1, 6),
    st.sampled_from([1, 3]),
    st.tuples(*[st.integers(3, 20)] * 4),
    st.floats(0.05, 1),
    st.floats(0.1, 1),
    st.floats(0.2, 5),
    st.integers(0, 3),
    st.integers(0, 2**31),
)
def test_any_settings_give_pictures(batch, channels, sides, scale, ratio, aspect, layers, seed):
    settings = Augment(
        scale=(scale / 2, scale), ratio=(ratio, 1 / ratio), layers=layers, magnitude=scale, erase=0.5
    )
    drawn = settings.draw(batch, torch.Generator().manual_seed(seed))
    pixels, aspects = noise(batch, channels, *sides[:2]), torch.full((batch,), aspect)
    images = settings(pixels, drawn, sides[2:], aspects)
    assert images.shape == (batch, channels, *sides[2:])
    assert images.dtype == torch.float32
    assert ((images >= -0.01) & (images <= 255.01)).all()
    half = batch // 2  # a part is varied as the whole is
    torch.testing.assert_close(
        images[half:], settings(pixels[half:], drawn[half:], sides[2:], aspects[half:]), atol=2e-3, rtol=0
    )
    still = dict.fromkeys(MOVES, torch.zeros(batch))
    maps = settings.map(dict(zip(COLUMNS, drawn.T, strict=False)), still, sides[2:], aspects)
    reach = maps[..., :2].abs().sum(-1) + maps[..., 2].abs()
    assert (reach <= 1 + 1e-5).all()  # crops lie within the picture


def test_a_map_in_pixels():
    pixels = torch.tensor([[[[0, 100], [200, 50]]]], dtype=torch.uint8)
    maps = torch.tensor([[[0.0, 0.0, 0.0], [0.0, 0.0, -0.5]]])  # all look at the middle of the upper row
    close(warp(pixels, maps, (1, 2)), torch.tensor([[[[50, 50]]]]))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"scale": (0.5, 0.2)}, r"scale is \(0.5, 0.2\); expected two numbers up to 1"),
        ({"scale": (0.5, 1.2)}, "scale is"),
        ({"scale": (0.0, 1.0)}, "scale is"),
        ({"ratio": (0.0, 1.0)}, "ratio is"),
        ({"pad_crop": -1}, "pad_crop is -1; expected pixels, or 0"),
        ({"flip": 1.5}, "flip is 1.5; expected a number from 0 to 1"),
        ({"layers": -1}, "layers is -1"),
        ({"magnitude": 9}, "magnitude is 9; expected a number from 0 to 1"),
        ({"erase": -0.1}, "erase is -0.1"),
    ],
)
def test_settings_that_make_no_sense(settings, says):
    with pytest.raises(ValueError, match=says):
        Augment(**settings)
