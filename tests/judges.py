"""The libraries that judge ours: `from judges import timm` (or `torchvision`, `transformers`).

Each is imported when it is first asked for, offline and quiet.

On a CPU build of torch, torchvision cannot load its compiled operators and then fails to import,
because it describes operators (`nms`, `roi_align`, …) that nobody has defined. Defining them by
name is enough: its models and transforms work, only those operators themselves do not.
"""

import os
import re
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"


def __getattr__(name: str) -> ModuleType:
    if name not in {"timm", "torchvision", "transformers"}:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    declare_torchvision_operators()
    return import_module(name)


@cache  # the definitions last as long as the library object, which the cache keeps
def declare_torchvision_operators() -> "torch.library.Library | None":
    """Define the operators that torchvision describes, unless its compiled ones are there."""
    import torch

    spec = find_spec("torchvision")
    if spec is None or spec.origin is None:
        return None
    package = Path(spec.origin).parent
    try:
        torch.ops.load_library(str(next(package.glob("_C.*"))))
    except (OSError, StopIteration):
        source = (package / "_meta_registrations.py").read_text(encoding="utf-8")
        library = torch.library.Library("torchvision", "DEF")
        for name in re.findall(r'register_(?:meta|fake)\("(?:torchvision::)?(\w+)"', source):
            library.define(f"{name}(Tensor a) -> Tensor")
        return library
    return None
