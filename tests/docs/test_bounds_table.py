"""docs/performance.md shows bounds and speeds of the CUDA kernels; ``python docs/update_bounds.py`` updates them."""

from machine_code.record import read_bounds
from support.scripts import load_script

UPDATE_BOUNDS = load_script("docs/update_bounds.py")


def test_bounds_are_up_to_date() -> None:
    (shown,) = UPDATE_BOUNDS.BLOCK.findall(UPDATE_BOUNDS.PAGE.read_text())
    assert shown == UPDATE_BOUNDS.table(read_bounds())


def test_what_no_benchmark_covers_is_not_called_measured() -> None:
    lines = UPDATE_BOUNDS.table(read_bounds()).splitlines()[2:]
    for row, line in zip(UPDATE_BOUNDS.ROWS, lines, strict=True):
        assert (row.measured is None) == line.endswith("| not measured |"), row.label
