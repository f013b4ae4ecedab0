"""How long a person waits before anything happens: `python benchmarks/import_time.py [ROUNDS]`.

Every command runs in a fresh interpreter, in turn within each round, after one round that is not
counted (it fills the caches of files and bytecode). The median over the rounds is reported.
"""

import os
import platform
import statistics
import subprocess
import sys
import time
from importlib.metadata import version

COMMANDS = {
    "import torch": ["-c", "import torch"],
    "import vitrail": ["-c", "import vitrail"],
    "import vitrail, touch every public name": [
        "-c",
        "import vitrail; [getattr(vitrail, name) for name in vitrail.__all__]",
    ],
    "vitrail --help": ["-m", "vitrail", "--help"],
}


def seconds(arguments: list[str]) -> float:
    """The wall-clock time of one fresh interpreter."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main(rounds: int = 11) -> None:
    """Measure and print."""
    taken: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for turn in range(rounds + 1):
        for name, arguments in COMMANDS.items():
            wall = seconds(arguments)
            if turn:
                taken[name].append(wall)
    medians = {name: statistics.median(times) for name, times in taken.items()}

    versions = ", ".join(f"{name} {version(name)}" for name in ("vitrail", "torch", "numpy"))
    threads = os.environ.get("OMP_NUM_THREADS", "not set")
    print(f"Python {platform.python_version()}, {versions}")
    print(f"{os.cpu_count()} cores, OMP_NUM_THREADS {threads}, median of {rounds} rounds")
    for name, arguments in COMMANDS.items():
        ratio = medians[name] / medians["import torch"]
        spread = f"{min(taken[name]):.3f} to {max(taken[name]):.3f}"
        print(f"{medians[name]:7.3f} s  ({spread})  {ratio:5.2f} x torch  {name}")
        print(f"           python {' '.join(arguments)}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
