"""Maps over pictures, sheets of them, and maps as text: pixel by pixel."""

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.look import as_text, overlay, sheet
from vitrail.look.draw import COLOURS, colour, stretched


def grey(width: int, height: int) -> Image.Image:
    return Image.new("RGB", (width, height), (128, 128, 128))


def luminance(pixels: np.ndarray) -> np.ndarray:
    """As the eye weighs red, green and blue (Rec. 709)."""
    return pixels @ np.array([0.2126, 0.7152, 0.0722])


def test_colours_go_from_dark_to_light_and_meet_their_steps() -> None:
    ramp = colour(np.linspace(0, 1, 101))
    assert ramp.shape == (101, 3)
    assert ramp.dtype == np.uint8
    assert np.array_equal(ramp[::25], COLOURS)
    assert (np.diff(luminance(ramp)) >= -0.5).all()  # but for rounding


def test_a_map_is_stretched_but_for_its_ends() -> None:
    seen = torch.arange(100.0).view(10, 10)
    drawn = stretched(7 * seen + 3)
    # 5 % of 99 is 4.95: from there to 94.05 it rises evenly.
    torch.testing.assert_close(drawn, ((seen - 4.95) / 89.1).clamp(0, 1))
    assert (stretched(torch.full((2, 3), 0.7)) == 0).all()


@pytest.mark.parametrize("shape", [(4,), (2, 3, 4), (1, 2, 3, 4)])
def test_several_maps_at_once_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"a map is \(rows, columns\), got .*mean of its heads"):
        overlay(grey(8, 8), torch.zeros(shape))


def test_full_strength_is_the_map_and_none_is_the_picture() -> None:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (20, 30, 3), dtype=np.uint8))
    assert np.array_equal(overlay(picture, torch.eye(2), strength=0.0), picture)
    drawn = np.asarray(overlay(picture, torch.eye(2), strength=1.0))
    assert tuple(drawn[0, 0]) == tuple(drawn[-1, -1]) == tuple(COLOURS[-1])
    assert tuple(drawn[0, -1]) == tuple(drawn[-1, 0]) == tuple(COLOURS[0])
    assert overlay(picture.convert("L"), torch.eye(2)).mode == "RGB"


def brightest(drawn: Image.Image) -> tuple[float, float]:
    """Row and column of the middle of what is brightest."""
    light = luminance(np.asarray(drawn).astype(float))
    rows, columns = np.nonzero(light == light.max())
    return rows.mean(), columns.mean()


def test_cells_that_reach_beyond_the_picture_stay_where_they_are() -> None:
    """3 x 5 cells of 16 pixels on a picture of 40 x 70: the last row and column are cut."""
    seen = torch.zeros(3, 5)
    seen[1, 3] = 1.0
    drawn = overlay(grey(70, 40), seen, patch=(16, 16), strength=1.0)
    assert drawn.size == (70, 40)
    # The cell (1, 3) is from 16 to 32 downwards and from 48 to 64 to the right; its middle pixels are
    # 23.5 and 55.5.
    row, column = brightest(drawn)
    assert abs(row - 23.5) < 1
    assert abs(column - 55.5) < 1


def test_a_rest_that_no_cell_covers_stays_as_it_was() -> None:
    """2 x 4 whole cells of 16 pixels on the same picture: 8 rows and 6 columns are not looked at."""
    seen = torch.zeros(2, 4)
    seen[1, 3] = 1.0
    drawn = overlay(grey(70, 40), seen, patch=(16, 16), strength=1.0)
    pixels = np.asarray(drawn)
    assert (pixels[32:] == 128).all()
    assert (pixels[:, 64:] == 128).all()
    assert tuple(pixels[31, 63]) == tuple(COLOURS[-1])
    whole = overlay(grey(64, 32), seen, strength=1.0)
    assert np.array_equal(pixels[:32, :64], np.asarray(whole))


@pytest.mark.parametrize(("count", "rows"), [(1, 1), (4, 1), (5, 1), (8, 2), (13, 2), (14, 2)])
def test_a_sheet_holds_every_picture_once(count: int, rows: int) -> None:
    shades = [10 * number + 20 for number in range(count)]
    drawn = sheet("title", [(str(shade), Image.new("RGB", (40, 30), (0, shade, 0))) for shade in shades])
    pixels = np.asarray(drawn)
    for shade in shades:
        assert (pixels == (0, shade, 0)).all(-1).sum() == 40 * 30
    assert drawn.height < (rows + 1) * (30 + 8 + 18) + 36


def test_a_map_as_text() -> None:
    seen = torch.tensor([[0.0, 1.0, 2.0], [3.0, 4.0, 4.0]])
    seen = torch.cat([seen, torch.zeros(20, 3), torch.full((20, 3), 4.0)])  # so that the ends are 0 and 4
    assert as_text(seen)[:2] == ["  ░░▒▒", "▓▓████"]
