"""The run folder: locks, full disks, and what is tidied up. (test_fit.py has the kills.)"""

import errno
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import learning
import vitrail
from compare import same
from vitrail.learn import state as module
from vitrail.learn.state import (
    STATES,
    State,
    WriteError,
    locked,
    read_data,
    read_lines,
    read_state,
    rewind,
    write_lines,
    write_model,
    write_state,
)


def state(step: int) -> State:
    tensors = {"a": torch.randn(3, 4), "half": torch.randn(5).bfloat16(), "count": torch.tensor(step)}
    return State(
        {**tensors, "nothing": torch.empty(0)}, {"step": step, "best": {"loss": 0.25}, "seconds": 0.5}
    )


def test_the_newest_state_is_read_back_bit_for_bit(tmp_path: Path) -> None:
    assert read_state(tmp_path) is None
    for step in (0, 5, 9):
        written = state(step)
        write_state(tmp_path, written)
        found = read_state(tmp_path)
        assert found is not None
        assert found.tensors.keys() == written.tensors.keys()
        assert all(same(found.tensors[name], written.tensors[name]) for name in written.tensors)
        assert found.facts == {**written.facts, "checksum": found.facts["checksum"]}
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(STATES)


def test_where_every_state_is_damaged_that_is_said(tmp_path: Path) -> None:
    """Not begun again in silence: what was learned would be written over."""
    write_state(tmp_path, state(1))
    (tmp_path / STATES[0]).write_bytes((tmp_path / STATES[0]).read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"damaged: resume-0\.safetensors\. Begin anew with another --out$"):
        read_state(tmp_path)
    save_file({"of": torch.zeros(1)}, tmp_path / STATES[1])  # whole, but no state
    (tmp_path / "best").mkdir()
    with pytest.raises(
        ValueError,
        match=rf"0\.safetensors, .*1\.safetensors; {tmp_path}/best can still .* --from {tmp_path}/best",
    ):
        read_state(tmp_path)


def test_what_tells_of_the_pictures_and_is_damaged_is_named(tmp_path: Path) -> None:
    for text in ("{", "[]", '{"counts": {}}'):
        (tmp_path / "data.json").write_text(text)
        with pytest.raises(
            ValueError, match=rf"which pictures {tmp_path} has .* as its data\.json is damaged or gone"
        ):
            read_data(tmp_path)


HOLD = "import sys, time; from pathlib import Path; from vitrail.learn.state import locked\n\
with locked(Path(sys.argv[1])): print('mine', flush=True); time.sleep(60)"


def test_two_runs_never_write_into_one_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "mine\n"
        expected = rf"being written to by process {other.pid} on .*another folder with --out"
        with pytest.raises(ValueError, match=expected), locked(tmp_path):
            pytest.fail("two at once")
        other.kill()  # it cannot clean up behind itself
    assert (tmp_path / ".owner").exists()
    with locked(tmp_path):
        assert str(os.getpid()) in (tmp_path / ".owner").read_text()
    assert not (tmp_path / ".owner").exists()


def test_no_folder_is_left_unless_something_was_written(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "new"
    with locked(folder):
        assert folder.is_dir()
    assert not list(tmp_path.iterdir())
    with locked(folder):
        (folder / "recipe.toml").touch()
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "recipe.toml"]
    with locked(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


@pytest.mark.parametrize(("name", "why"), [("file", "File exists"), ("file/run", "Not a directory")])
def test_what_cannot_be_a_run_folder(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(ValueError, match=f"{name} cannot be a run folder: {why}; choose another with --out"),
        locked(tmp_path / name),
    ):
        pytest.fail("in a file")


def test_what_a_killed_run_left_is_tidied_up(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").touch()
    for name, aside in (("last", True), ("best", False)):
        workshop = tmp_path / f".{name}.x1y2"
        (workshop / "new").mkdir(parents=True)
        (workshop / "old").mkdir()
        (workshop / "old" / "kept").touch()
        if not aside:
            (tmp_path / name).mkdir()
    with locked(tmp_path):
        assert (tmp_path / "last" / "kept").exists(), "it was between two renames"
        assert not (tmp_path / "best" / "kept").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "best", "last", "recipe.toml"]


@pytest.mark.parametrize(
    ("folder", "begun"), [(".last.x1y2", False), (".config.d", True), (".best.notes", True)]
)
def test_folders_of_others_are_left_alone(tmp_path: Path, folder: str, begun: bool) -> None:
    """Of one that is no run at all; in a run those of other names, and those with other things inside."""
    if begun:
        (tmp_path / "recipe.toml").touch()
    kept = tmp_path / folder / ("mine" if folder == ".best.notes" else "new")
    kept.mkdir(parents=True)
    with locked(tmp_path):
        pass
    assert kept.is_dir()


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch):
    """Files may hold 1,000 bytes, as when that is all the room there is."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, ignored)


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, full_disk) -> None:
    before = state(3)
    model = learning.tiny(learning.recipe())
    write_state(tmp_path, before)
    write_model(model, tmp_path / "last")
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    big = State({"a": torch.zeros(10_000)}, {"step": 4})
    full_disk()
    with pytest.raises(
        WriteError, match=rf"resume-1.safetensors could not be written: .*--resume --out {tmp_path}"
    ):
        write_state(tmp_path, big)
    with pytest.raises(WriteError, match="last could not be written"):
        write_model(model, tmp_path / "last")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files
    found = read_state(tmp_path)
    assert found is not None
    assert found.facts["step"] == 3
    assert vitrail.load(tmp_path / "last") is not None


def test_the_reason_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module.os, "fsync", refuse)
    with pytest.raises(WriteError, match=r"metrics.jsonl could not be written: No space left on device\."):
        write_lines(tmp_path, [{"step": 1}])


def test_a_run_on_a_full_disk_goes_on_when_there_is_room(tmp_path: Path, full_disk) -> None:
    small = learning.recipe()
    learning.run(tmp_path / "undisturbed", small)
    learning.run(tmp_path / "disturbed", small)
    newest = max((tmp_path / "disturbed" / name for name in STATES), key=lambda path: path.stat().st_mtime_ns)
    newest.unlink()
    full_disk()
    with pytest.raises(WriteError):
        learning.run(tmp_path / "disturbed", small)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    learning.run(tmp_path / "disturbed", small)
    one, two = (tmp_path / name / "last" / "model.safetensors" for name in ("undisturbed", "disturbed"))
    assert one.read_bytes() == two.read_bytes()


def test_rewinding_keeps_what_came_before_and_drops_what_is_torn(tmp_path: Path) -> None:
    lines = [{"part": "train", "step": step, "time": time.time(), "loss": 1 / step} for step in (1, 2, 3, 4)]
    write_lines(tmp_path, lines)
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    for torn in (b"[]\n", b"{}\n", b"\xff\0", b'{"part": "tra'):
        (tmp_path / "metrics.jsonl").write_bytes(whole + torn)
        assert read_lines(tmp_path, 10) == lines
    rewind(tmp_path, 3)
    assert read_lines(tmp_path, 10) == lines[:3]
    write_lines(tmp_path, lines[3:])
    assert read_lines(tmp_path, 10) == lines
