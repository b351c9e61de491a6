"""Which GPUs can run a build, by the compute capabilities of the GPU and of the compiled code."""

import re

import pytest
from support.paths import ROOT

from fastinfer.utils.cuda_archs import have_kernels_for

T4, A100, A10, RTX_4090, H100, B200, B300, RTX_5090 = (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)
ALL = {T4, A100, A10, RTX_4090, H100, B200, B300, RTX_5090}


@pytest.mark.parametrize(
    ("archs", "gpus"),
    [
        ("90a", {H100}),
        ("80,90a", ALL - {T4}),
        ("80", ALL - {T4}),
        ("80,86,89,90a", ALL - {T4}),  # PTX of 89 alone, and machine code of 80
        ("89", {RTX_4090, H100, B200, B300, RTX_5090}),
        ("89,86", ALL - {T4, A100}),
        ("86,89", ALL - {T4, A100}),
        ("90a,100", {H100, B200, B300, RTX_5090}),
        ("100a", {B200}),
        ("80-real", {A100, A10, RTX_4090}),
        ("80-real,90a-real", {A100, A10, RTX_4090, H100}),
        ("86-virtual", ALL - {T4, A100}),
        ("90a-virtual", {H100}),
        ("90-real,80-virtual", ALL - {T4}),
    ],
)
def test_gpus_of_a_build(archs: str, gpus: set[tuple[int, int]]) -> None:
    assert {gpu for gpu in ALL if have_kernels_for(gpu, archs.split(","))} == gpus


def test_nothing_compiled() -> None:
    assert not any(have_kernels_for(gpu, []) for gpu in ALL)


def test_the_build_makes_this_ptx() -> None:
    """The last architecture without a suffix, and no other."""
    build = re.sub(r"\s+", " ", (ROOT / "CMakeLists.txt").read_text())
    assert "list(APPEND archs ${arch}-real) set(newest_portable ${arch})" in build
    assert "if(newest_portable) list(APPEND archs ${newest_portable}-virtual) endif()" in build
