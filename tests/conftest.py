"""What every test relies on: the same random numbers each time, and the data when it is there."""

import os
from pathlib import Path

import pytest
import torch

import judges  # noqa: F401  (goes offline, which must come before any hub library is imported)

ROOT = Path(__file__).resolve().parents[1]

os.environ["PYTHONPATH"] = str(ROOT / "src")  # what a test starts runs this code, installed or not
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # one core for each worker, and for what it starts
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test starts from the same random state."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data and weights; tests that need it are skipped where it is missing."""
    folder = Path(os.environ.get("VITRAIL_SHARED", ROOT.parent / "shared"))
    if not folder.is_dir():
        pytest.skip(f"needs real data: no folder {folder} (set VITRAIL_SHARED to where it is)")
    return folder
