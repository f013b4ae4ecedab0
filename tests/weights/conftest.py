"""Small models of our own, saved."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import vitrail
from tiny import tiny


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Callable[..., Path]:
    """Saves such a model and returns its folder."""

    def write(**changes: Any) -> Path:
        vitrail.save(tiny(**changes), tmp_path / "tiny")
        return tmp_path / "tiny"

    return write
