"""What importing costs, and which room may import which."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import vitrail

PACKAGE = Path(vitrail.__file__).parent

# room → the rooms it may import, beside itself and `words`, which everybody may. Attention, tokens and
# positions are the parts; models are made of them; all else is made of models, except data, which knows none.
PARTS = {"attention", "tokens", "positions"}
MODELS = {*PARTS, "data", "models"}
ABOVE = {*MODELS, "weights", "look"}
MAY_IMPORT: dict[str, set[str]] = {
    "words": set(),
    "attention": PARTS,
    "tokens": PARTS,
    "positions": PARTS,
    "data": set(),
    "models": {*PARTS, "data"},
    "weights": MODELS,
    "look": MODELS,
    "learn": ABOVE,
    "cli": {*ABOVE, "learn"},
    "__init__": {*ABOVE, "learn"},
    "__main__": {"cli"},
}


def rooms_imported(source: str, package: str) -> set[str]:
    """The rooms that a module in `package` imports, anywhere in it and however spelled."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                module = ".".join([*parent, module]).rstrip(".")
            homes = vitrail._HOMES if module == "vitrail" else {}
            names |= {homes.get(alias.name, f"{module}.{alias.name}") for alias in node.names}
    inside = {tuple(name.split(".")) for name in names}
    return {path[1] for path in inside if path[0] == "vitrail" and len(path) > 1} - {"__version__"}


def forbidden(source: str, path: Path) -> set[str]:
    """The rooms that the module at `path` (relative to the package) imports but may not."""
    room = path.parts[0].removesuffix(".py")
    package = ".".join(["vitrail", *path.parent.parts])
    return rooms_imported(source, package) - {room, "words"} - MAY_IMPORT[room]


MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_imports_point_one_way(path: Path) -> None:
    assert forbidden((PACKAGE / path).read_text(encoding="utf-8"), path) == set()


@pytest.mark.parametrize(
    "source",
    [
        "import vitrail.models.vit",
        "from vitrail.models import vit",
        "from vitrail import models",
        "from vitrail import create",
        "from ..models.vit import ViT",
        "from .. import models",
        "def late():\n    from vitrail import models",
    ],
)
def test_an_import_the_wrong_way_is_caught(source: str) -> None:
    assert forbidden(source, Path("attention/core.py")) == {"models"}


@pytest.mark.parametrize(
    "source", ["from .core import attend", "import torch", "from vitrail import __version__"]
)
def test_other_imports_are_left_alone(source: str) -> None:
    assert forbidden(source, Path("attention/heads.py")) == set()


@pytest.mark.parametrize("name", vitrail.__all__)
def test_public_names_resolve(name: str) -> None:
    assert getattr(vitrail, name) is not None
    assert name in dir(vitrail)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonesuch'"):
        _ = vitrail.nonesuch


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True)


def test_a_bare_import_leads_to_every_room() -> None:
    """In a process where nothing else has imported them."""
    rooms = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
    assert {"attention", "data", "look", "weights"} < set(rooms)
    script = f"import vitrail; print([vitrail.{'.__name__, vitrail.'.join(rooms)}.__name__])"
    assert python("-c", script).stdout == f"{[f'vitrail.{room}' for room in rooms]}\n"


@pytest.mark.parametrize("module", ["vitrail", "vitrail.cli"])
def test_importing_does_not_import_torch(module: str) -> None:
    heavy = "{'torch', 'numpy', 'PIL'} & set(sys.modules)"
    assert python("-c", f"import sys, {module}; print({heavy})").stdout == "set()\n"


def test_help_does_not_import_torch() -> None:
    run = python("-X", "importtime", "-m", "vitrail", "--help")
    assert "usage" in run.stdout.lower()
    imported = {line.rpartition("|")[2].strip() for line in run.stderr.splitlines()}
    assert "vitrail.cli" in imported
    assert imported.isdisjoint({"torch", "numpy", "PIL"})
