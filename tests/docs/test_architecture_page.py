"""docs/architecture.md names the files and folders that there are."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python/fastinfer"
TEXT = (ROOT / "docs/architecture.md").read_text()


def first_cells(heading: str) -> set[str]:
    """The names in the first column of the table under a head that begins with ``heading``."""
    rows = TEXT.partition(f"| {heading}")[2].partition("\n\n")[0].splitlines()[2:]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])}


def names_in(folder: Path, *patterns: str) -> set[str]:
    found = {path.name for pattern in patterns for path in folder.glob(pattern)}
    return found - {"__init__.py", "__pycache__", "include", "lib"}


def test_every_file_of_the_engine_has_a_row() -> None:
    assert first_cells("file in `engine/`") == names_in(PACKAGE / "engine", "*.py")


def test_every_file_of_the_simulation_has_a_row() -> None:
    assert first_cells("file in `simulation/`") == names_in(PACKAGE / "simulation", "*.py")


def test_every_package_has_a_row() -> None:
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert packages
    assert not packages - first_cells("package of `python/fastinfer`")


def test_every_folder_of_csrc_has_a_row() -> None:
    folders = {path.parent.name for path in (ROOT / "csrc").glob("*/*.*")}
    assert folders
    assert not folders - first_cells("folder of `csrc`")
