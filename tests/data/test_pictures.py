"""Pictures of every kind come out as a viewer shows them, and what is no picture says why."""

import io
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from judges import transformers
from vitrail.data.pictures import PictureError, open_picture

NOISE = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
EVERY_BYTE = np.arange(256, dtype=np.uint8).reshape(16, 16)


def encoded(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def pixels(source):
    picture = open_picture(source)
    assert picture.mode == "RGB"
    return np.asarray(picture)


def png(width, height, depth, colour, rows):
    """A PNG written by hand, for kinds that Pillow does not write. rows: the bytes of each row."""

    def chunk(kind, data):
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    data = zlib.compress(b"".join(b"\0" + row for row in rows))
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def test_every_way_to_hand_over_a_picture(tmp_path):
    path = tmp_path / "a b.png"
    path.write_bytes(encoded(Image.fromarray(NOISE)))
    with path.open("rb") as file:
        assert (pixels(file) == NOISE).all()
        assert not file.closed
    for source in (
        path,
        str(path),
        path.read_bytes(),
        bytearray(path.read_bytes()),
        Image.open(path),
        NOISE,
        np.asfortranarray(NOISE),
        torch.from_numpy(NOISE).permute(2, 0, 1),
    ):
        assert (pixels(source) == NOISE).all()


def test_the_given_image_is_left_as_it_was():
    exif = Image.Exif()
    exif[0x0112] = 6
    image = Image.open(io.BytesIO(encoded(Image.fromarray(NOISE), exif=exif)))
    open_picture(image)
    assert image.size == (7, 5)
    assert image.getexif()[0x0112] == 6


def test_greyscale():
    for source in (Image.fromarray(EVERY_BYTE), EVERY_BYTE, EVERY_BYTE[:, :, None]):
        assert (pixels(source) == EVERY_BYTE[:, :, None]).all()
    assert (pixels(torch.from_numpy(EVERY_BYTE)[None]) == EVERY_BYTE[:, :, None]).all()


def test_one_bit():
    bits = NOISE[:, :, 0] > 127
    for source in (encoded(Image.fromarray(bits)), bits, torch.from_numpy(bits)[None]):
        assert (pixels(source) == np.where(bits, 255, 0)[:, :, None]).all()


@pytest.mark.parametrize(
    ("sixteen", "eight"),
    # 65535 / 255 = 257 steps of 16 bits make one of 8: 128/257 = 0.498, 129/257 = 0.502
    [(0, 0), (128, 0), (129, 1), (257, 1), (300, 1), (32768, 128), (65406, 254), (65407, 255)],
)
def test_sixteen_bits_are_scaled(sixteen, eight):
    array = np.full((3, 2), sixteen, np.uint16)
    grey = Image.fromarray(array)
    sources = {
        "array": array,
        "big-endian array": array.astype(">u2"),
        "tensor": torch.from_numpy(array)[None],
        "image": grey,
        "png": encoded(grey),
        "tiff": encoded(grey, "TIFF"),
        "32-bit image": Image.fromarray(array.astype(np.int32)),
    }
    for name, source in sources.items():
        assert (pixels(source) == eight).all(), name


def test_sixteen_bits_in_colour():
    wide = NOISE.astype(np.uint16) * 257
    assert (pixels(wide) == NOISE).all()
    rows = [row.astype(">u2").tobytes() for row in wide]
    assert (pixels(png(7, 5, depth=16, colour=2, rows=rows)) == NOISE).all()


def test_floats_run_from_0_to_1():
    for kind in (np.float16, np.float32, np.float64):
        assert (pixels((EVERY_BYTE / 255).astype(kind)) == EVERY_BYTE[:, :, None]).all()
    assert (pixels(Image.fromarray(np.float32(EVERY_BYTE / 255))) == EVERY_BYTE[:, :, None]).all()
    half = torch.tensor([0.0, 0.5, 1.0], dtype=torch.bfloat16).view(1, 1, 3).requires_grad_()
    assert pixels(half)[0, :, 0].tolist() == [0, 128, 255]  # 127.5 rounds to the even number


def test_palette():
    image = Image.fromarray(np.array([[0, 1], [2, 1]], np.uint8)).convert("P")
    image.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
    colours = np.array([[[10, 20, 30], [40, 50, 60]], [[70, 80, 90], [40, 50, 60]]])
    for kind in ("PNG", "GIF"):
        assert (pixels(encoded(image, kind)) == colours).all()
        seen = pixels(encoded(image, kind, transparency=1))
        assert (seen == np.where(colours == colours[0, 1], 255, colours)).all()
    # alpha 51 is one fifth: 0.2 · 10 + 0.8 · 255 = 206, then 208, 210
    assert pixels(encoded(image, transparency=bytes([51, 255, 0])))[:, 0].tolist() == [
        [206, 208, 210],
        [255, 255, 255],
    ]


def test_transparent_colour():
    image = Image.fromarray(np.array([[[1, 2, 3], [4, 5, 6]]], np.uint8))
    assert pixels(encoded(image, transparency=(1, 2, 3))).tolist() == [[[255] * 3, [4, 5, 6]]]
    grey = Image.fromarray(np.array([[7, 8]], np.uint8))
    assert pixels(encoded(grey, transparency=7))[0, :, 0].tolist() == [255, 8]


@pytest.mark.parametrize("channels", [2, 4])
def test_alpha_lies_on_white(channels):
    array = np.random.default_rng(1).integers(0, 256, (32, 32, channels), dtype=np.uint8)
    image = Image.fromarray(array)
    judge = transformers.image_transforms.convert_to_rgb(image, return_numpy=True)
    alpha = array[:, :, -1:] / 255
    exact = alpha * array[:, :, :-1] + (1 - alpha) * 255
    for source in (image, encoded(image), *([array] if channels == 4 else [])):
        assert (pixels(source) == judge).all()
        assert abs(pixels(source) - exact).max() <= 1
    assert (np.asarray(image.convert("RGB")) != judge).any()


def test_cmyk():
    cyan, magenta, yellow, black = np.diag([255] * 4).tolist()
    inks = np.array([[[0] * 4, cyan, magenta, yellow, black]], np.uint8)
    seen = [[255, 255, 255], [0, 255, 255], [255, 0, 255], [255, 255, 0], [0, 0, 0]]
    image = Image.fromarray(inks.repeat(16, 0).repeat(16, 1), "CMYK")
    assert pixels(image)[8, 8::16].tolist() == seen
    assert pixels(encoded(image, "TIFF"))[8, 8::16].tolist() == seen
    jpeg = pixels(encoded(image, "JPEG", quality=100))[8, 8::16]  # Adobe's JPEGs store it inverted
    assert abs(jpeg.astype(int) - seen).max() <= 2


# The stored picture for each EXIF orientation, of one that shows NOISE: "row 0 is the top, column 0
# the left side" is 1, "top, right" 2, and so on through the standard's table.
STORED = {
    1: NOISE,
    2: NOISE[:, ::-1],
    3: NOISE[::-1, ::-1],
    4: NOISE[::-1],
    5: NOISE.swapaxes(0, 1),
    6: NOISE.swapaxes(0, 1)[::-1],
    7: NOISE.swapaxes(0, 1)[::-1, ::-1],
    8: NOISE.swapaxes(0, 1)[:, ::-1],
}


@pytest.mark.parametrize("orientation", STORED)
@pytest.mark.parametrize("kind", ["PNG", "WebP", "TIFF"])
def test_exif_orientation(orientation, kind):
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"exif": exif} | ({"lossless": True} if kind == "WebP" else {})
    file = encoded(Image.fromarray(STORED[orientation].copy()), kind, **options)
    picture = open_picture(file)
    assert (np.asarray(picture) == NOISE).all()
    assert (np.asarray(picture) == ImageOps.exif_transpose(Image.open(io.BytesIO(file)))).all()
    assert (pixels(picture) == NOISE).all(), "turned twice"
    assert (pixels(Image.open(io.BytesIO(file))) == NOISE).all()


@pytest.mark.filterwarnings("ignore")  # Pillow's, about the damage
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WebP"])
def test_damaged_exif_says_nothing_about_the_pixels(kind):
    plain = pixels(encoded(Image.fromarray(NOISE), kind))
    for junk in (b"Exif\0\0junk", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff", b"MM\0*"):
        assert (pixels(encoded(Image.fromarray(NOISE), kind, exif=junk)) == plain).all()


def test_first_picture_of_several():
    frames = [Image.fromarray(NOISE), Image.fromarray(255 - NOISE)]
    file = encoded(frames[0], "TIFF", save_all=True, append_images=frames[1:])
    assert (pixels(file) == NOISE).all()


def test_photos_are_what_pillow_reads(shared):
    for path in sorted((shared / "data/imagenet_samples").iterdir())[::100]:
        assert (pixels(path) == np.asarray(Image.open(path).convert("RGB"))).all()


PHOTO = Image.fromarray(np.random.default_rng(2).integers(0, 256, (64, 64, 3), dtype=np.uint8))
FILES = {
    "truncated.jpg": (encoded(PHOTO, "JPEG")[:2000], "truncated"),
    "truncated.png": (encoded(PHOTO)[:2000], "truncated"),
    "empty.jpg": (b"", r"empty \(0 bytes\)"),
    "text.jpg": (b"<html>404</html>", "not a picture in a known format"),
    "bomb.png": (png(60_000, 60_000, 8, 2, [b""]), "decompression bomb"),
}


@pytest.mark.parametrize("name", FILES)
def test_bad_files(name, tmp_path):
    content, reason = FILES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(PictureError, match=f"{name}.*{reason}"):
        open_picture(tmp_path / name)
    with pytest.raises(PictureError, match=f"{len(content)} bytes.*{reason}"):
        open_picture(content)
    with (tmp_path / name).open("rb") as file, pytest.raises(PictureError, match=f"{name}.*{reason}"):
        open_picture(file)


def test_paths_that_lead_nowhere(tmp_path):
    with pytest.raises(PictureError, match=r"no\.jpg cannot be read: No such file"):
        open_picture(tmp_path / "no.jpg")
    with pytest.raises(PictureError, match=f"{tmp_path} cannot be read: Is a directory"):
        open_picture(str(tmp_path))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (None, "NoneType cannot be read: expected a path, bytes"),
        (io.StringIO("text"), "'rb'"),
        (np.zeros((3, 4, 5), np.uint8), r"shape \(3, 4, 5\).*expected an array \(height, width\)"),
        (np.zeros((0, 4, 3), np.uint8), "at least one pixel"),
        (torch.zeros(1, 3, 4, 5), r"expected a tensor \(channels, height, width\)"),
        (torch.zeros(5, 4, 3), r"\(5, 4, 3\)"),
        (torch.randn(3, 8, 8), r"floats from 0 to 1, given float32 from -\d.* undo its norm"),
        (np.full((4, 4), np.nan), "nan"),
        (NOISE.astype(np.int64), "given int64 from"),
        (Image.fromarray(np.array([[-1, 70000]], np.int32)), "given int32 from -1 to 70000"),
    ],
)
def test_what_is_no_picture(source, reason):
    with pytest.raises(PictureError, match=reason):
        open_picture(source)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "TIFF", "WebP", "BMP"])
@pytest.mark.filterwarnings("ignore")  # Pillow's, about damaged metadata
def test_damaged_files_raise_nothing_else(kind):
    random = np.random.default_rng(3)
    good = np.frombuffer(encoded(PHOTO, kind), np.uint8)
    refused = 0
    for _ in range(60):
        file = good[: random.integers(1, len(good) + 1)].copy()
        file[random.integers(0, len(file), 5)] = random.integers(0, 256, 5)
        try:
            assert open_picture(file.tobytes()).mode == "RGB"
        except PictureError:
            refused += 1
    assert refused
