"""Two processes against one, as torchrun starts them."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.multiprocessing
from safetensors.torch import load_file
from torch import nn

import learning
from compare import distance
from vitrail.learn.recipe import changes
from vitrail.learn.state import STATES, read_lines


def torchrun(folder: Path, *changes: str) -> subprocess.CompletedProcess[str]:
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        learning.__file__,
        str(folder),
    ]
    return subprocess.run([sys.executable, *command, *changes], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One run of one process, one of two; with batch norms, mixed pictures, and noise inside the model."""
    folder = tmp_path_factory.mktemp("processes")
    words = ["batch=32", "model.drop_path=0.4", "model.dropout=0.2"]
    learning.run(folder / "one", learning.recipe(**changes(words)))
    done = torchrun(folder / "two", *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("validation") == 3, "not one voice"
    return folder / "one", folder / "two"


def test_losses_are_the_same(both: tuple[Path, Path]) -> None:
    one, two = (read_lines(folder, 10**9) for folder in both)
    assert [(line["part"], line["step"]) for line in one] == [(line["part"], line["step"]) for line in two]
    for ours, theirs in zip(one, two, strict=True):
        for name in {"loss", "accuracy", "norm", "lr"} & ours.keys():
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4), (ours["part"], ours["step"], name)


def test_weights_and_statistics_are_the_same(both: tuple[Path, Path]) -> None:
    one, two = (load_file(folder / "last" / "model.safetensors") for folder in both)
    assert any(name.endswith("running_var") for name in one)
    for name in one:
        if not name.endswith("key.bias"):  # its gradient is 0 but for rounding, of which Adam makes steps
            assert distance(one[name], two[name]) < 1e-3, name
    start = learning.tiny(learning.recipe()).state_dict()
    assert distance(start["head.weight"], one["head.weight"]) > 0.1, "nothing was learned"


def test_a_run_of_one_goes_on_as_two(both: tuple[Path, Path], tmp_path: Path) -> None:
    one, _ = both
    shutil.copytree(one, tmp_path, dirs_exist_ok=True)
    (tmp_path / STATES[0]).unlink()  # the last one; the other is a step older
    done = torchrun(tmp_path, "batch=32", "model.drop_path=0.4", "model.dropout=0.2")
    assert "going on after step 5 of 6; sums round differently now, as" in done.stdout
    assert "processes was 1, is 2" in done.stdout
    kept, other = (load_file(folder / "last" / "model.safetensors") for folder in (one, tmp_path))
    assert all(distance(kept[name], other[name]) < 1e-3 for name in kept if not name.endswith("key.bias"))


def test_what_goes_wrong_is_said_by_all_and_nobody_hangs(tmp_path: Path) -> None:
    done = torchrun(tmp_path, "model.layer_scale=1e30")
    assert done.returncode != 0
    assert (
        "DivergedError: step 1: the loss is nan, and the first that is no number is the layer" in done.stderr
    )


def _shared_norm(rank: int, port: int, results: str) -> None:
    """Half of a batch through a batch norm that both processes share, and its gradient."""
    from vitrail.learn.processes import shared_batch_norm

    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", world_size=2, rank=rank)
    norm, x, weights = _norm_and_input()
    mine = x.detach().chunk(2)[rank].clone().requires_grad_()
    y = shared_batch_norm(norm, mine)
    (y * weights.chunk(2)[rank]).sum().backward()
    torch.save((y, mine.grad, norm.running_mean, norm.running_var), f"{results}/{rank}.pt")
    torch.distributed.destroy_process_group()


def _norm_and_input() -> tuple[nn.BatchNorm2d, torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    norm = nn.BatchNorm2d(5)
    nn.init.normal_(norm.weight)
    return norm, torch.randn(6, 5, 3, 4) * 3 + 7, torch.randn(6, 5, 3, 4)


def test_shared_batch_norm_is_that_of_the_whole_batch(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_shared_norm, args=(_free_port(), str(tmp_path)), nprocs=2)
    norm, x, weights = _norm_and_input()
    x.requires_grad_()
    y = norm(x)
    (y * weights).sum().backward()
    halves = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert distance(torch.cat([half[0] for half in halves]), y) < 1e-5
    assert distance(torch.cat([half[1] for half in halves]), x.grad) < 1e-4
    for half in halves:
        assert distance(half[2], norm.running_mean) < 1e-5
        assert distance(half[3], norm.running_var) < 1e-5


def _free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
