"""Pictures that need no download: shapes, drawn."""

from __future__ import annotations

from PIL import Image, ImageDraw


def shapes(size: int = 224) -> dict[str, Image.Image]:
    """Name → picture of one shape on a plain ground, each in another place."""
    third = size // 3
    places = {
        "disc, top left": ("ellipse", (third // 4, third // 4), "#c8442f"),
        "square, bottom right": (
            "rectangle",
            (2 * third - third // 4, 2 * third - third // 4),
            "#2f6fc8",
        ),
        "disc, in the middle": ("ellipse", (third, third), "#e0a526"),
    }
    drawn = {}
    for name, (shape, (left, top), ink) in places.items():
        picture = Image.new("RGB", (size, size), "#e9e6df")
        getattr(ImageDraw.Draw(picture), shape)((left, top, left + third, top + third), fill=ink)
        drawn[name] = picture
    return drawn
