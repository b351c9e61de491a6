"""What `make cuda` must notice in the compiler's log and in the machine code."""

import shutil
from collections import defaultdict
from pathlib import Path

import check_cuda_build as check
import pytest
from machine_code.bounds import Bound
from machine_code.disassembly import short_names
from machine_code.examine import Compiled, examine_listing

SYMBOL = "_ZN9fastinfer4cuda12_GLOBAL__N_111gemm_kernelI6__halfLi8EEEvNS_10GemmParamsE"
LOG = f"""ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '{SYMBOL}' for 'sm_80'
ptxas info    : Function properties for {SYMBOL}
    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 16 bytes smem, 416 bytes cmem[0]
ptxas info    : Compiling entry function '{SYMBOL}' for 'sm_90a'
ptxas info    : Function properties for {SYMBOL}
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 416 bytes cmem[0]
"""
SASS = f"""
arch = sm_90a
\t\tFunction : {SYMBOL}
        /*0010*/                   IMAD.MOV.U32 R1, RZ, RZ, c[0x0][0x28] ;   /* 0x00000a00ff017624 */
                                                                             /* 0x000fe400078e00ff */
        /*0020*/              @!P0 LDG.E.128.CONSTANT R4, [R2.64] ;          /* 0x0000000402047981 */
        /*0030*/              @UP1 LDGSTS.E.BYPASS.128 [R7], [R2.64] ;       /* 0x0000000402077fae */
        /*0040*/                   LDG.E R4, [R2.64] ;                       /* 0x0000000402047981 */
        /*0050*/                   HMMA.16816.F32 R8, R4, R6, R8 ;           /* 0x000000060408723c */
"""


def kernels() -> dict[tuple[str, str], check.Kernel]:
    found = {(kernel.symbol, kernel.arch): kernel for kernel in check.parse_log(LOG)}
    for kernel in found.values():
        kernel.name = "gemm_kernel<fp16, 8>"
    return found


def count_instructions(found: dict[tuple[str, str], check.Kernel]) -> None:
    known = {key: Compiled("pack_kernel", 1, 0) for key in found}  # a name whose loops have no bounds
    for examined in examine_listing(SASS, known, defaultdict(dict)):
        kernel = found[examined.symbol, examined.arch]
        kernel.opcodes, kernel.wide_loads = examined.opcodes, examined.wide_loads


def test_log() -> None:
    spilling, sound = check.parse_log(LOG)
    assert (spilling.arch, spilling.registers, spilling.static_shared, spilling.stack) == ("80", 255, 16, 16)
    assert (spilling.spills, sound.spills) == (20, 0)
    assert (sound.arch, sound.registers) == ("90a", 128)


def test_unknown_log_is_an_error() -> None:
    with pytest.raises(SystemExit, match="not understood"):
        list(check.parse_log(LOG.replace("Used 255 registers", "")))


def test_instructions() -> None:
    found = kernels()
    count_instructions(found)
    kernel = found[SYMBOL, "90a"]
    assert kernel.opcodes == {"IMAD": 1, "LDG": 2, "LDGSTS": 1, "HMMA": 1}
    assert kernel.wide_loads == 2
    assert found[SYMBOL, "80"].opcodes == {}


def test_problems() -> None:
    found = kernels()
    count_instructions(found)
    assert not list(check.kernel_problems([found[SYMBOL, "90a"]]))
    spills, slow, narrow = check.kernel_problems([found[SYMBOL, "80"]])
    assert "spills registers: 20 bytes" in spills
    assert "no HMMA" in slow
    assert "16 bytes" in narrow


def test_an_exception_is_for_its_kernel_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "SPILLS_ALLOWED", {"gemm_kernel": (20, "a reason")})
    monkeypatch.setattr(check, "TENSOR_CORES", {})
    monkeypatch.setattr(check, "NARROW_LOADS", {"gemm_kernel": "a reason"})
    assert not list(check.kernel_problems(list(kernels().values())))
    for allowed in ({"another_kernel": (20, "a reason")}, {"gemm_kernel": (19, "a reason")}):
        monkeypatch.setattr(check, "SPILLS_ALLOWED", allowed)
        assert list(check.kernel_problems(list(kernels().values())))


@pytest.mark.skipif(shutil.which("c++filt") is None, reason="no c++filt")
def test_short_names() -> None:
    assert short_names([SYMBOL]) == ["gemm_kernel<fp16, 8>"]


def test_update_keeps_the_bounds_of_other_architectures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check.record, "PATH", tmp_path / "bounds.json")
    monkeypatch.setattr(check, "ROOT", tmp_path)
    old, new = {("k", "80", ""): {"A100": Bound(0.5, "issue")}}, {("k", "90a", ""): {"H100": Bound(0.6, "issue")}}
    assert check.compare_bounds(old, update=False).problems == ["k (sm_80) has no committed bound"]
    check.compare_bounds(old, update=True)
    check.compare_bounds(new, update=True)
    assert not check.compare_bounds(old | new, update=False).problems
    fallen = {("k", "80", ""): {"A100": Bound(0.4, "issue")}}
    assert "fell from 0.500 to 0.400" in check.compare_bounds(fallen, update=False).problems[0]
