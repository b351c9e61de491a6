"""How threads share the units of a product: no row is lost, and nobody waits long for the busiest."""

import subprocess
from itertools import pairwise
from math import ceil
from pathlib import Path

import pytest
from support.paths import ROOT

UNPACK_ROWS = 96  # what a range of rows costs on top of its own, as in unit_partition.h


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("unit_partition") / "program"
    sources = ["-I", ROOT / "csrc", ROOT / "tests" / "cpp" / "unit_partition.cpp", "-o", program]
    subprocess.run(["g++", "-std=c++20", "-Wall", "-Wextra", "-Werror", *sources], check=True)
    return program


def partitions(program: Path, cases: list[tuple[int, int, int]]) -> list[tuple[int, list[int]]]:
    """The whole units of each case (units, rows, threads), and the bounds of the ranges of rows of the others."""
    text = "\n".join(" ".join(map(str, case)) for case in cases)
    run = subprocess.run([program], input=text, capture_output=True, text=True, check=True, timeout=60)
    lines = [list(map(int, line.split())) for line in run.stdout.splitlines()]
    assert all(len(bounds) == parts + 1 for _, parts, *bounds in lines)
    return [(whole, bounds) for whole, _, *bounds in lines]


def test_every_row_of_every_unit_is_computed_once(program: Path) -> None:
    cases = [(u, r, t) for u in range(40) for r in (1, 255, 256, 257, 511, 1000) for t in (1, 2, 3, 5, 16, 64)]
    for (units, rows, threads), (whole, bounds) in zip(cases, partitions(program, cases), strict=True):
        assert 0 <= whole <= units
        if len(bounds) == 2:
            assert whole == units
        else:
            assert whole % threads == 0
            assert bounds[0] == 0
            assert bounds[-1] == rows
            assert bounds == sorted(set(bounds))
            assert all(bound % 32 == 0 for bound in bounds[:-1])


@pytest.mark.parametrize("rows", [512, 1024])
def test_sixteen_threads_share_the_products_of_a_prompt_evenly(program: Path, rows: int) -> None:
    """The units of the default model's products: QKV, the output and down, gate and up. Uncut, 18 units reach 0.56."""
    products = [30, 18, 96]
    for units, (whole, bounds) in zip(products, partitions(program, [(u, rows, 16) for u in products]), strict=True):
        longest = max(end - begin for begin, end in pairwise(bounds)) + UNPACK_ROWS
        cut = (units - whole) * (len(bounds) - 1)
        busiest = ceil(whole / 16) * (rows + UNPACK_ROWS) + ceil(cut / 16) * longest
        assert units * (rows + UNPACK_ROWS) / 16 / busiest > 0.85


def test_few_rows_many_units_and_one_thread_are_not_cut(program: Path) -> None:
    cases = [(18, 64, 16), (18, 255, 16), (129, 512, 16), (18, 512, 1), (32, 512, 16)]
    assert [whole for whole, _ in partitions(program, cases)] == [case[0] for case in cases]
