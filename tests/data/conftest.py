"""Files of pictures for the tests of reading them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

Files = Callable[..., Path]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """Writes files below a folder: pictures of noise, all different."""
    noise = np.random.default_rng(0)

    def write(*names: str, folder: Path = tmp_path / "photos", size=(12, 16)) -> Path:
        folder.mkdir(exist_ok=True, parents=True)
        for name in names:
            path = folder / name
            path.parent.mkdir(exist_ok=True, parents=True)
            Image.fromarray(noise.integers(0, 256, (*size, 3), dtype=np.uint8)).save(path)
        return folder

    return write
