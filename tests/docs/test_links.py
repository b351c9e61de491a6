"""Links between the Markdown files lead to files and headings that exist; `make docs` sees only those of docs/."""

import re
from pathlib import Path

import pytest
from support.paths import ROOT

FILES = [
    ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "examples/cpp/README.md")
]
PAGES = [*FILES, *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]*))?\)")


def prose(path: Path) -> str:
    return re.sub(r"^ *```.*?^ *```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> list[str]:
    """The headings as GitHub names them in addresses."""
    headings = re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page: Path) -> None:
    for target, anchor in LINK.findall(prose(page)):
        file = page.parent / target if target else page
        assert file.exists(), target
        is_object = anchor.startswith("fastinfer.")  # of a docstring
        assert not anchor or is_object or anchor in anchors(file), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_headings_differ(page: Path) -> None:
    found = anchors(page)
    assert len(found) == len(set(found)), sorted(name for name in set(found) if found.count(name) > 1)
