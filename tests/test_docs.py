"""What the documents promise is there."""

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


def test_python_in_the_readme_is_python() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 3
    for block in blocks:
        compile(block, "README.md", "exec")
