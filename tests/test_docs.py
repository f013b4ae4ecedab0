"""What the documents promise is there."""

import pkgutil
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def dead_links(page: Path, text: str) -> list[str]:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    return [link for link in links if "://" not in link and not (page.parent / link).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert dead_links(page, page.read_text(encoding="utf-8")) == []


def test_a_dead_link_would_be_found() -> None:
    assert dead_links(ROOT / "README.md", "see [this](docs/no-such-page.md#here)") == ["docs/no-such-page.md"]


def names_in(text: str) -> set[str]:
    """Everything that is called vitrail.x or vitrail.x.y."""
    return set(re.findall(r"(?<![\w./-])vitrail(?:\.[A-Za-z_]\w*)+", text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_are_there(page: Path) -> None:
    for name in names_in(page.read_text(encoding="utf-8")):
        assert pkgutil.resolve_name(name) is not None, name


def test_a_name_that_is_not_there_would_be_found() -> None:
    (name,) = names_in("see `vitrail.look.no_such_name(…)`, not src/vitrail/look.py")
    with pytest.raises(AttributeError):
        pkgutil.resolve_name(name)


def test_python_in_the_readme_is_python() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 3
    for block in blocks:
        compile(block, "README.md", "exec")
