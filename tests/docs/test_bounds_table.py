"""docs/performance.md shows the committed bounds of the CUDA kernels; ``python docs/update_bounds.py`` updates it."""

from machine_code.record import read_bounds
from support.scripts import load_script

UPDATE_BOUNDS = load_script("docs/update_bounds.py")


def test_bounds_are_up_to_date() -> None:
    (shown,) = UPDATE_BOUNDS.BLOCK.findall(UPDATE_BOUNDS.PAGE.read_text())
    assert shown == UPDATE_BOUNDS.table(read_bounds())


def test_nothing_is_called_measured() -> None:
    rows = UPDATE_BOUNDS.table(read_bounds()).splitlines()[2:]
    assert rows
    assert all(row.endswith("| not yet run on a GPU |") for row in rows)
