"""Runs killed at random instants, and one whose disk fills up: all end with the undisturbed run's weights.

    python benchmarks/kills.py [COUNT]

A short run on the built-in digits is left alone once. The same run is then killed (SIGKILL, its whole
process group) at each of COUNT random instants, 30 by default, and resumed. At last it runs on a small file
system in memory, which only root may mount, until that is full; it is resumed when there is room again.
Every tensor of the last state and of both models, last and best, is compared bit for bit.
"""

from __future__ import annotations

import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

import vitrail
from vitrail.learn.state import read_state

RUN = shlex.split(
    "digits epochs=8 batch=64 lr=5e-3 model.width=48 model.depth=3 model.heads=3 model.mlp_width=96 "
    "model.stem=conv model.pool=mean model.drop_path=0.1 augment.layers=1 augment.erase=0.2 "
    "mixup=0.2 cutmix=1.0 ema=0.95 save_seconds=0.2 precision=float32 attention=fused"
)
ROOM = "size=16m"  # of the small disk; a run takes about two


def start(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    """`vitrail train` in a process group of its own; what it says goes to a file beside the folder."""
    command = [sys.executable, "-m", "vitrail", "train", *words, "--out", str(folder)]
    with folder.with_suffix(".txt").open("wb") as said:
        return subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, start_new_session=True)


def finish(folder: Path, *words: str) -> str:
    """Runs to the end; what was said."""
    code = start(folder, *words).wait()
    said = folder.with_suffix(".txt").read_text()
    if code:
        raise SystemExit(f"vitrail train {' '.join(words)} --out {folder} ended with {code}:\n{said}")
    return said


def tensors(folder: Path) -> dict[str, Tensor]:
    """Those of the newest state and of both models."""
    state = read_state(folder)
    found = {} if state is None else dict(state.tensors)
    for kind in ("last", "best"):
        for name, tensor in load_file(folder / kind / "model.safetensors").items():
            found[f"{kind}/{name}"] = tensor
    return found


def verdict(folder: Path, expected: dict[str, Tensor]) -> str:
    """The same, or how many tensors are not bit for bit as expected."""
    found = tensors(folder)
    wrong = [n for n in expected.keys() | found.keys() if not (n in found and n in expected)]
    wrong += [n for n in expected.keys() & found.keys() if not expected[n].equal(found[n])]
    return f"DIFFERENT: {len(wrong)} tensors, such as {min(wrong)}" if wrong else "same"


def kill(folder: Path, moment: float) -> str:
    """Kills a run so many seconds after its start and brings it to its end; where it went on."""
    process = start(folder, *RUN)
    time.sleep(moment)
    os.killpg(process.pid, signal.SIGKILL)  # one that is through is still there until it is waited for
    process.wait()
    step = re.search(r"going on after step (\d+)", finish(folder, *RUN, "--resume"))
    return f"resumed at step {step[1]}" if step else "begun again, as there was no state yet"


def fill_disk(disk: Path, expected: dict[str, Tensor]) -> str:
    """Leaves a run no room once it has kept a state, then makes room and resumes."""
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", ROOM, "none", disk], capture_output=True)
    if mounted.returncode:
        return f"skipped: {mounted.stderr.decode().strip()}"
    try:
        process = start(disk, *RUN)
        while process.poll() is None and not ((state := read_state(disk)) and state.facts["step"]):
            time.sleep(0.05)
        ballast = disk / "ballast"
        subprocess.run(["cp", "/dev/zero", ballast], stderr=subprocess.DEVNULL)
        code = process.wait()
        print(f"exit code {code}: {disk.with_suffix('.txt').read_text().splitlines()[-1]}")
        parameters = sum(parameter.numel() for parameter in vitrail.load(disk / "last").parameters())
        step = "none" if (state := read_state(disk)) is None else state.facts["step"]
        print(f"kept: the state of step {step}, and last/, a model of {parameters:,} parameters")
        ballast.unlink()
        finish(disk, "--resume")
        return verdict(disk, expected)
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)  # tensors that were read are mapped files


def main(count: int = 30) -> int:
    """Prints a line for each kill, and the sums; 1 if any tensor differs."""
    with tempfile.TemporaryDirectory() as space:
        place = Path(space)
        began = time.monotonic()
        finish(place / "undisturbed", *RUN)
        duration = time.monotonic() - began
        expected = tensors(place / "undisturbed")
        print(f"undisturbed: {duration:.1f} s, {len(expected)} tensors", flush=True)
        draw = random.Random(0)
        verdicts = []
        for number in range(count):
            folder, moment = place / f"kill-{number}", draw.uniform(0, duration)
            where = kill(folder, moment)
            verdicts.append(verdict(folder, expected))
            print(f"kill {number + 1:>2}  at {moment:5.2f} s  {where:<40}{verdicts[-1]}", flush=True)
        print(f"killed {count} times, {verdicts.count('same')} the same bit for bit")
        print("\nthe disk fills up")
        verdicts.append(fill_disk(place / "disk", expected))
        print(f"with room again, resumed to its end: {verdicts[-1]}")
        return int(any(said.startswith("DIFFERENT") for said in verdicts))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
