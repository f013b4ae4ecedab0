"""Pictures from anywhere, as a viewer shows them: RGB, 8 bit, upright."""

from __future__ import annotations

import os
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

if TYPE_CHECKING:
    from torch import Tensor

Source: TypeAlias = (
    "str | os.PathLike[str] | bytes | bytearray | BinaryIO | Image.Image | np.ndarray | Tensor"
)

# What undoes each EXIF orientation.
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class PictureError(ValueError):
    """A picture that cannot be read. The text names it and says why; `reason` only says why."""

    def __init__(self, text: str, reason: str = "") -> None:
        super().__init__(text)
        self.reason = reason or text


def open_picture(source: Source, *, shortest: int | None = None) -> Image.Image:
    """The picture in RGB, 8 bit, upright; what is transparent lies on white.

    source: a path, the bytes of a file, a file opened with "rb", a PIL image, an array
    (height, width) or (height, width, 1 | 3 | 4), or a tensor (1 | 3 | 4, height, width). Arrays
    and tensors hold uint8, uint16, bool, or floats from 0 to 1.
    shortest: how many pixels the shortest side must have at least; a larger JPEG file is then decoded
        to a half, a quarter or an eighth of its size, which is several times quicker.
    """
    try:
        image = _image(source)
        if shortest:
            image.draft(None, (shortest, shortest))
        image.load()  # only now is the picture decoded
        picture = _rgb(_upright(image))
    except Exception as error:  # decoders let a damaged or hostile file raise almost anything
        reason = _reason(error)
        raise PictureError(f"{_name(source)} cannot be read: {reason}", reason) from error
    picture.info.clear()  # it is upright now: nobody shall turn it again
    return picture


def picture_size(source: Source) -> tuple[int, int]:
    """(height, width) of the upright picture, by what its file says of it."""
    try:
        image = _image(source)
        turned = image.getexif().get(ExifTags.Base.Orientation) in (5, 6, 7, 8)
    except Exception as error:
        reason = _reason(error)
        raise PictureError(f"{_name(source)} cannot be read: {reason}", reason) from error
    return (image.width, image.height) if turned else (image.height, image.width)


def in_colour(picture: Image.Image) -> bool:
    """Whether a picture in RGB has a pixel that is not grey."""
    red, green, blue = picture.split()
    return red != green or green != blue


def _image(source: Any) -> Image.Image:
    if isinstance(source, Image.Image):
        return source
    if hasattr(source, "permute"):  # a tensor, without importing torch to ask
        source = _array(source)
    if isinstance(source, np.ndarray):
        return _image_of_array(source)
    if isinstance(source, (str, os.PathLike)):
        source = Path(source).read_bytes()
    elif hasattr(source, "read"):
        source = source.read()
    if not isinstance(source, (bytes, bytearray)):
        raise ValueError("expected a path, bytes, a file opened with 'rb', a PIL image, an array or a tensor")
    if not source:
        raise ValueError("it is empty (0 bytes)")
    return Image.open(BytesIO(source))


def _array(tensor: Tensor) -> np.ndarray:
    """(1 | 3 | 4, height, width) → (height, width, 1 | 3 | 4)."""
    if tensor.ndim != 3 or tensor.shape[0] not in (1, 3, 4):
        raise ValueError("expected a tensor (channels, height, width) with 1, 3 or 4 channels")
    tensor = tensor.detach().cpu()
    # numpy has no bfloat16
    return (tensor.float() if tensor.is_floating_point() else tensor).permute(1, 2, 0).numpy()


def _image_of_array(array: np.ndarray) -> Image.Image:
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3 or array.shape[2] not in (1, 3, 4) or not array.size:
        raise ValueError(
            "expected an array (height, width) or (height, width, channels) with 1, 3 or 4 channels"
            " and at least one pixel"
        )
    pixels = _eight_bit(array)
    return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)


def _eight_bit(values: np.ndarray) -> np.ndarray:
    """The same picture in uint8: the whole range scaled, rounded to the nearest."""
    kind = values.dtype.newbyteorder("=")
    if kind == np.uint8:
        return np.ascontiguousarray(values)
    if kind == np.bool_:
        return values.astype(np.uint8) * 255
    if kind == np.uint16:
        return ((values.astype(np.uint32) + 128) // 257).astype(np.uint8)  # 65535 / 255 = 257
    low, high = values.min(), values.max()
    if np.issubdtype(kind, np.floating) and -1e-3 <= low <= high <= 1 + 1e-3:
        return np.rint(values.clip(0, 1) * 255).astype(np.uint8)
    raise ValueError(
        f"expected uint8, uint16 or floats from 0 to 1, given {kind} from {low:g} to {high:g}; "
        "scale it, or undo its normalisation, first"
    )


def _upright(image: Image.Image) -> Image.Image:
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # notes that are damaged say nothing about the pixels
        return image
    return image.transpose(UPRIGHT[orientation]) if orientation in UPRIGHT else image


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        values = np.asarray(image)
        if image.mode == "I" and values.min() >= 0 and values.max() < 2**16:
            values = values.astype(np.uint16)  # 16 bits kept in 32
        image = Image.fromarray(_eight_bit(values))
    if image.mode == "La":
        image = image.convert("LA")
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    return image.convert("RGB")


def _name(source: Any) -> str:
    if isinstance(source, (str, os.PathLike)):
        return os.fspath(source)
    if isinstance(source, (bytes, bytearray)):
        return f"a picture of {len(source)} bytes"
    if hasattr(source, "shape"):
        return f"a picture of shape {tuple(source.shape)} and type {source.dtype}"
    named = getattr(source, "filename", None) or getattr(source, "name", None)
    return str(named or f"a picture given as {type(source).__name__}")


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "it is not a picture in a known format (JPEG, PNG, WebP, GIF, TIFF, BMP …)"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
