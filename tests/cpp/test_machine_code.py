"""Bounds of kernels from their machine code, on small listings."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from machine_code.bounds import Bound, bound_of
from machine_code.control_flow import EXIT, find_blocks, find_loops
from machine_code.cost import cost_of, latency
from machine_code.examine import Compiled, examine_listing
from machine_code.gpus import GPUS
from machine_code.listing import Instruction, read_functions
from machine_code.operands import overwritten_operands
from machine_code.pipes import pipe_of, thread_bytes
from machine_code.record import compare, read_bounds, write_bounds
from machine_code.rounds import Round, rounds_of
from machine_code.tiles import Tile, compile_tiles, read_tiles
from machine_code.walk import Walk, cheapest_walk

A100, H100 = (next(gpu for gpu in GPUS if gpu.name == name) for name in ("A100", "H100"))
LISTING = """
arch = sm_90a
code version = [1,8]
\t\tFunction : copy_kernel
\t.headerflags\t@"EF_CUDA_SM90"
        /*0000*/                   LDC R1, c[0x0][0x28] ;                    /* 0x00000a00ff017b82 */
                                                                             /* 0x000fe20000000800 */
        /*0010*/              @!P0 LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ; /* 0x0000000402047981 */
                                                                             /* 0x000ea8000c1e1d00 */
        /*0020*/                   STG.E.128 desc[UR4][R8.64], R4 ;          /* 0x0000000408007986 */
                                                                             /* 0x004fe2000c101d04 */
        /*0030*/               @P1 BRA 0x10 ;                                /* 0xfffffffc00f41947 */
                                                                             /* 0x000fea000383ffff */
        /*0040*/                   EXIT ;                                    /* 0x000000000000794d */
                                                                             /* 0x000fea0003800000 */
arch = sm_80
\t\tFunction : empty_kernel
        /*0000*/                   EXIT ;                                    /* 0x000000000000794d */
"""


def program(text: str) -> list[Instruction]:
    """Make instructions of lines "opcode operands", maybe after a predicate "@P0"; label:line names an address."""
    lines = [line.strip() for line in text.strip().splitlines()]
    labels = {line.partition(":")[0]: f"0x{16 * i:x}" for i, line in enumerate(lines) if ":" in line}
    code = []
    for i, line in enumerate(lines):
        words = line.rpartition(":")[2].split()
        predicate = words.pop(0)[1:] if words[0].startswith("@") else ""
        operands = " ".join(labels.get(word, word) for word in words[1:])
        code.append(Instruction(16 * i, words[0], operands, predicate, 1, (), ()))
    return code


def opcodes(walk: Walk | None) -> list[str]:
    assert walk is not None
    return [instruction.opcode for instruction in walk.code]


# ---- the listing ----


def test_listing() -> None:
    copy, empty = read_functions(LISTING)
    assert (copy.symbol, copy.arch, empty.symbol, empty.arch) == ("copy_kernel", "90a", "empty_kernel", "80")
    assert [i.opcode for i in copy.code] == ["LDC", "LDG.E.128.CONSTANT", "STG.E.128", "BRA", "EXIT"]
    load, store, branch = copy.code[1:4]
    assert (load.address, load.predicate, load.operands) == (0x10, "!P0", "R4, desc[UR4][R2.64]")
    assert load.sets == (2,)
    assert (store.waits, branch.operands) == ((2,), "0x10")
    assert empty.code[0].stall == 1  # without its second line


# ---- control flow ----


def test_blocks_and_loops() -> None:
    code = program("""
        MOV R1
        outer:MOV R2
        inner:IADD3 R3
        @P0 BRA inner
        @P1 EXIT
        BRA outer
    """)
    blocks = find_blocks(code)
    assert {address: block.successors for address, block in blocks.items()} == {
        0x00: {0x10}, 0x10: {0x20}, 0x20: {0x20, 0x40}, 0x40: {EXIT, 0x50}, 0x50: {0x10},
    }  # fmt: skip
    inner, outer = find_loops(blocks)
    assert (inner.head, inner.body) == (0x20, {0x20})
    assert (outer.head, outer.body) == (0x10, {0x10, 0x20, 0x40, 0x50})


def test_a_branch_may_name_its_condition_among_its_operands() -> None:
    blocks = find_blocks(program("BRA !UP0, 0x20\nMOV R1\nEXIT"))
    assert blocks[0].successors == {0x10, 0x20}


def test_an_indirect_jump_leads_to_blocks_that_nothing_else_leads_to() -> None:
    blocks = find_blocks(program("BRX R2\nMOV R1\nBRA end\nMOV R2\nend:EXIT"))
    assert blocks[0].successors == {0x10, 0x30}


def test_a_call_may_be_a_far_branch() -> None:
    blocks = find_blocks(program("@P0 CALL.REL.NOINC far\nEXIT\nfar:MOV R1\nRET.REL.NODEC R2"))
    assert blocks[0].successors == {0x10, 0x20}
    assert blocks[0x20].successors == set()


# ---- operands ----

PRODUCT = "HGMMA.64x64x16.F32 R24, R8, gdesc[UR4], R24, gsb0"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x"


@pytest.mark.parametrize(
    ("text", "is_overwritten"),
    [
        (f"{PRODUCT}\nMOV R12, RZ\n{WAIT}0\nMOV R8, RZ\nEXIT", False),
        (f"{PRODUCT}\nMOV R11, RZ\n{WAIT}0\nEXIT", True),
        (f"{PRODUCT}\nLDS.128 R8, [R2]\n{WAIT}0\nEXIT", True),
        (f"{PRODUCT}\nCS2R R6, SRZ\n{WAIT}0\nEXIT", False),
        (f"{PRODUCT}\nCS2R R10, SRZ\n{WAIT}0\nEXIT", True),
        (f"{PRODUCT}\nLDSM.16.M88.4 R5, [R2]\n{WAIT}0\nEXIT", True),
        (f"{PRODUCT}\nSHFL.IDX PT, R9, R2, R3, 0x1c1f\n{WAIT}0\nEXIT", True),
        (f"{PRODUCT}\nSTS.128 [R8], R8\n{WAIT}0\nEXIT", False),
        # One group may still be under way, which is the product's own until another one follows.
        (f"{PRODUCT}\n{WAIT}1\nMOV R8, RZ\nEXIT", True),
        (f"{PRODUCT}\n{PRODUCT.replace('R8', 'R12')}\n{WAIT}1\nMOV R8, RZ\n{WAIT}0\nEXIT", False),
        # Where a loop begins again.
        (f"head:MOV R8, RZ\n{PRODUCT}\n@P0 BRA head\n{WAIT}0\nEXIT", True),
        (f"head:{WAIT}0\nMOV R8, RZ\n{PRODUCT}\n@P0 BRA head\n{WAIT}0\nEXIT", False),
    ],
)
def test_operands_that_are_overwritten_too_early(text: str, is_overwritten: bool) -> None:
    assert bool(list(overwritten_operands(program(text)))) == is_overwritten


# ---- the walk ----

OPTIONAL = """
    MOV R1
    head:LDGSTS.E.128 R2
    @P0 BRA skip
    FMUL R3
    FMUL R4
    skip:HMMA.16816.F32 R5
    @P1 BRA head
    EXIT
"""


def test_an_optional_branch_is_avoided() -> None:
    walk = cheapest_walk(program(OPTIONAL), (("LDGSTS", 1), ("HMMA", 1)), straight=False)
    assert opcodes(walk) == ["LDGSTS.E.128", "BRA", "HMMA.16816.F32", "BRA"]


def test_work_selects_an_option() -> None:
    walk = cheapest_walk(program(OPTIONAL), (("FMUL", 2), ("HMMA", 1)), straight=False)
    assert opcodes(walk) == ["LDGSTS.E.128", "BRA", "FMUL", "FMUL", "HMMA.16816.F32", "BRA"]


INNER = """
    head:LDGSTS.E.128 R2
    inner:HMMA.16816.F32 R5
    @P0 BRA inner
    @P1 BRA head
    EXIT
"""


def test_an_inner_loop_is_repeated_as_the_work_needs() -> None:
    walk = cheapest_walk(program(INNER), (("LDGSTS", 1), ("HMMA", 3)), straight=False)
    assert opcodes(walk).count("HMMA.16816.F32") == 3
    assert len(opcodes(walk)) == 1 + 3 * 2 + 1


def test_a_round_goes_around_the_loop_once() -> None:
    assert cheapest_walk(program(OPTIONAL), (("FFMA", 1),), straight=False) is None
    twice = cheapest_walk(program(OPTIONAL), (("HMMA", 2),), straight=False)  # no loop does it at once
    assert opcodes(twice).count("LDGSTS.E.128") == 2


def test_an_unrolled_loop_does_several_rounds() -> None:
    code = program("head:LDG.E.128 R2\nFADD R3\nLDG.E.128 R4\nFADD R5\n@P0 BRA head\nEXIT")
    walk = cheapest_walk(code, (("LDG.E.128", 1), ("FADD", 1)), straight=False)
    assert walk is not None
    assert walk.rounds == 2
    assert cost_of(walk, straight=False).instructions == 2.5


def test_an_unrolled_loop_is_preferred_to_the_loop_for_its_rest() -> None:
    code = program("""
        head:LDG.E.128 R2
        LDG.E.128 R3
        LDG.E.128 R4
        @P0 BRA head
        rest:LDG.E.128 R2
        @P1 BRA rest
        EXIT
    """)
    walk = cheapest_walk(code, (("LDG.E.128", 1),), straight=False)
    assert walk is not None
    assert (len(walk.code), walk.rounds) == (4, 3)


def test_more_than_the_work_but_not_twice_is_one_round() -> None:
    code = program("head:LDGSTS.E.128 R2\nLDGSTS.E.128 R3\nLDGSTS.E.128 R4\n@P0 BRA head\nEXIT")
    walk = cheapest_walk(code, (("LDGSTS", 2),), straight=False)
    assert walk is not None
    assert walk.rounds == 1


def test_predicated_products_are_optional() -> None:
    code = program("head:@P3 HMMA.16816.F32 R2\nHMMA.16816.F32 R4\n@P0 BRA head\nEXIT")
    walk = cheapest_walk(code, (("HMMA", 1),), straight=False)
    assert walk is not None
    assert walk.rounds == 1
    assert cost_of(walk, straight=False).pipes["hmma"] == 1


def test_a_straight_walk_ends_at_an_exit() -> None:
    code = program("LDG.E.128 R2\n@P0 BRA slow\nSTG.E.128 R2\nEXIT\nslow:FMUL R2\nSTG.E.128 R2\nEXIT")
    walk = cheapest_walk(code, (("LDG.E.128", 1), ("STG.E.128", 1)), straight=True)
    assert opcodes(walk) == ["LDG.E.128", "BRA", "STG.E.128", "EXIT"]


# ---- costs and bounds ----


def test_pipes_and_bytes() -> None:
    pipes = {
        "HMMA.16816.F32": "hmma", "IMMA.16832.S8.S8": "imma", "HFMA2.BF16_V2": "bf16", "HFMA2": "half",
        "IMAD.WIDE": "imad", "FFMA": "fp32", "LOP3.LUT": "alu", "F2FP.BF16.F32.PACK_AB": "alu", "MUFU.EX2": "mufu",
        "HGMMA.64x256x16.F32.BF16": "hgmma",
        "IGMMA.64x256x32.S8.S8": "igmma", "I2F.S8": "mufu", "LDGSTS.E.BYPASS.128": "copy", "LDG.E.128": "load",
        "LDS.128": "shared load", "LDSM.16.M88.4": "shared load", "STS": "shared store", "SHFL.BFLY": "shuffle",
        "BSYNC": "branch", "UIADD3": "uniform",
    }  # fmt: skip
    assert {opcode: pipe_of(opcode) for opcode in pipes} == pipes
    sizes = {"LDG.E.128.CONSTANT": 16, "LDS.64": 8, "LDG.E": 4, "STG.E.U16": 2, "LDS.U8": 1, "LDSM.16.M88.4": 16}
    sizes["HGMMA.64x256x16.F32.BF16"] = (64 + 256) * 32 // 128  # two matrices, which four warps read together
    sizes["IGMMA.64x256x32.S8.S8"] = 256 * 32 // 128  # the other is in registers
    assert {opcode: thread_bytes(opcode) for opcode in sizes} == sizes
    assert thread_bytes("HGMMA.64x256x16.F32.BF16", "R24, R216, gdesc[UR8], R24") == 256 * 32 // 128


def test_cost_counts_what_runs_for_certain() -> None:
    code = program("head:LDGSTS.E.128 R2\n@P2 LDGSTS.E.128 R3\nLDS.128 R4\nFFMA R5\n@P0 BRA head\nEXIT")
    cost = cost_of(Walk(code[:5], rounds=1), straight=False)
    assert (cost.instructions, cost.predicated) == (5, 2)
    assert cost.pipes == {"copy": 1, "shared load": 1, "fp32": 1}
    assert (cost.global_bytes, cost.shared_bytes) == (2 * 512, 2 * 512)


def test_latency_waits_for_scoreboards_of_the_round_before() -> None:
    load = Instruction(0, "LDG.E.128", "R2", "", stall=2, sets=(0,), waits=())
    use = Instruction(16, "FADD", "R2", "", stall=4, sets=(), waits=(0,))
    assert latency(Walk([load, use], 1), rounds=1) == 500 + 4
    assert latency(Walk([use, load], 1), rounds=2) == 500 + 4  # the load is waited for one round later


ROUND = Round(work=(), bytes=1024, l2_bytes=1024, threads=256)


def walk_of(**numbers: int) -> Walk:
    return Walk(program("\n".join(opcode.replace("_", ".") for opcode, n in numbers.items() for _ in range(n))), 1)


@pytest.mark.parametrize(
    ("numbers", "binds"),
    [
        ({"MOV": 10}, "memory"),
        ({"MOV": 400}, "alu"),  # two a clock, fewer than 2.6 are issued
        ({"MOV": 100, "FADD": 200, "UMOV": 100}, "issue"),
        ({"MUFU": 100}, "mufu"),
        ({"HMMA_16816_F32": 100}, "tensor"),
        ({"LDS_128": 40}, "shared memory"),
    ],
)
def test_binding_resource(numbers: dict[str, int], binds: str) -> None:
    bound = bound_of(cost_of(walk_of(**numbers), straight=False), ROUND, H100, registers=32)
    assert bound.binds == binds
    assert (bound.share > 1) == (binds == "memory")


def test_latency_binds_where_few_warps_are_resident() -> None:
    assert H100.resident_warps(256, registers=32, shared_bytes=0) == 64
    assert H100.resident_warps(256, registers=255, shared_bytes=0) == 8
    assert H100.resident_warps(256, registers=32, shared_bytes=100 * 1024) == 16
    code = [Instruction(16 * i, "LDG.E.128", "R2", "", 1, (0,), (0,)) for i in range(4)]
    cost = cost_of(Walk(code, 1), straight=False)
    assert bound_of(cost, replace(ROUND, shared=200 * 1024), H100, 32).binds == "latency"


def test_shares_of_copy_and_of_the_tensor_peak() -> None:
    cost = cost_of(walk_of(MOV=260, FADD=260, HMMA_16816_F32=0), straight=False)  # 200 clocks of issue
    bound = bound_of(cost, replace(ROUND, bytes=200 * A100.copy_bytes_per_clock / 2), A100, 32)
    assert bound.share == pytest.approx(0.5)
    products = cost_of(walk_of(HMMA_16816_F32=100), straight=False)
    wide = replace(ROUND, bytes=1, flop=100 * 4096, bound_by_tensor_cores=True)
    bound = bound_of(products, wide, A100, 32)
    assert (bound.share, bound.tflops) == (pytest.approx(1), pytest.approx(312, rel=0.01))
    products = cost_of(walk_of(HGMMA_64x256x16_F32_BF16=4), straight=False)
    wide = replace(wide, flop=4 * 2 * 16 * 256 * 16, l2_bytes=1)
    assert bound_of(products, wide, H100, 32).share == pytest.approx(0.96)
    products = cost_of(walk_of(IGMMA_64x256x32_S8_S8=4), straight=False)
    wide = replace(wide, flop=4 * 2 * 16 * 256 * 32)
    assert bound_of(products, wide, H100, 32).share == pytest.approx(0.96)


# ---- rounds of kernels ----

TILES = {"Int4": {16: Tile(128, 128, 256, 65936)}, "attention": {128: Tile(64, 64, 128, 82944)}}


def test_round_of_a_product() -> None:
    (work,) = rounds_of("gemm_kernel<GemmKernel<Int4Weight<bf16>, bf16, 16, false>>", TILES) or []
    # A warp's eighth of 128 x 128 nibbles and of 16 x 128 tokens; 2 row tiles x 2 token tiles x 4 blocks of 16 inputs.
    assert dict(work.work) == {"LDGSTS": 1024 // 512 + 512 // 512 + 1, "HMMA": 16}
    assert (work.bytes, work.flop) == (1024 + 32, 16 * 4096)


def test_round_of_a_product_of_warpgroups() -> None:
    tiles = {"Dense": {256: Tile(128, 64, 256, 196608, warpgroups=True)}}
    (work,) = rounds_of("gemm_kernel<GemmWideKernel<DenseWeight<bf16>, bf16, 256, false>>", tiles) or []
    assert dict(work.work) == {"LDGSTS": 2048 // 512 + 4096 // 512, "HGMMA": 4}
    assert work.flop == 2 * 128 * 256 * 64 / 8
    (work,) = rounds_of("w8a8_gemm_kernel<256>", {"w8a8": {256: Tile(128, 128, 256, 196608, warpgroups=True)}}) or []
    assert dict(work.work) == {"LDGSTS": 2048 // 512 + 4096 // 512, "IGMMA": 4}
    assert work.flop == 2 * 128 * 256 * 128 / 8


def test_rounds_of_attention() -> None:
    rounds = {work.mode: work for work in rounds_of("paged_attention_kernel<bf16, 128>", TILES) or []}
    assert len(rounds) == 8
    assert dict(rounds["decode, 16-bit KV"].work) == {"LDGSTS": 16, "HMMA": 32, "MUFU.EX2": 8}
    assert dict(rounds["prefill, 16-bit KV"].work) == {"LDGSTS": 16, "HMMA": 128, "MUFU.EX2": 32}
    int4 = {"LDGSTS": 5, "HMMA": 32, "MUFU.EX2": 8, "STS.128": 16, "F2FP": 64}
    assert dict(rounds["decode, int4 KV"].work) == int4
    assert rounds["decode, int4 KV"].bytes == 4096 * 5 / 8


def test_round_of_attention_of_a_warpgroup() -> None:
    tiles = {"attention": {128: Tile(128, 64, 128, 82944, warpgroups=True)}}
    decode, prefill = rounds_of("paged_attention_kernel<bf16, 0, 128>", tiles) or []
    assert dict(decode.work) == {"LDGSTS": 16, "HMMA": 32, "MUFU.EX2": 8}
    assert dict(prefill.work) == {"LDGSTS": 16, "HGMMA": 24, "MUFU.EX2": 64}


def test_rounds_of_attention_with_one_kind_of_cache() -> None:
    decode, prefill = rounds_of("paged_attention_kernel<bf16, 3, 128>", TILES) or []
    assert (decode.mode, prefill.mode) == ("decode, int4 KV", "prefill, int4 KV")
    assert dict(decode.work) == {"LDGSTS": 5, "HMMA": 32, "MUFU.EX2": 8}
    assert dict(prefill.work) == {"LDGSTS": 5, "HMMA": 128, "MUFU.EX2": 32, "STS.128": 16}


def test_kernels_without_rounds() -> None:
    assert rounds_of("softcap_kernel<bf16, 1>", TILES) == []
    assert rounds_of("new_kernel<bf16, 8>", TILES) is None


def test_tiles() -> None:
    text = '{"H100": {"w8a8": {"8": {"rows": 128, "chunk": 64, "threads": 256, "shared": 7}}}}'
    assert read_tiles(text)["H100"]["w8a8"][8] == Tile(128, 64, 256, 7)
    assert read_tiles(text)["H100"]["w8a8"][8].warps == 8


def test_examined_kernel() -> None:
    names = {"copy_kernel": "softcap_kernel<bf16, 8>", "empty_kernel": "new_kernel"}
    known = {
        (symbol, arch): Compiled(names[symbol], 32, 0)
        for symbol, arch in (("copy_kernel", "90a"), ("empty_kernel", "80"))
    }
    tiles = {gpu.name: TILES for gpu in GPUS}
    copy, unknown = examine_listing(LISTING, known, tiles)
    (loop,) = copy.loops
    assert loop.cost.instructions == 5
    assert loop.bounds.keys() == {"H100", "H200"}
    assert (copy.opcodes["LDG"], copy.wide_loads) == (1, 1)
    assert unknown.problems == ["new_kernel (sm_80): rounds.py has no family for it"]


def test_a_copy_that_is_encoded_wrongly_is_a_problem() -> None:
    given, copy = "LDG.E.128.CONSTANT R4, desc[UR4][R2.64]", "LDGSTS.E.BYPASS.128 [R7+UR0], desc[UR1][R4.64], P0"
    assert given in LISTING
    known = {("copy_kernel", "90a"): Compiled("new_kernel", 32, 0)}
    for listing, problems in ((LISTING, 0), (LISTING.replace(given, copy), 1)):
        (found,) = examine_listing(listing, known, {gpu.name: TILES for gpu in GPUS})
        assert sum("has encoded a copy with a cache policy wrongly" in text for text in found.problems) == problems


def test_a_loop_that_does_not_do_the_work_is_a_problem() -> None:
    known = {("copy_kernel", "90a"): Compiled("sample_kernel", 32, 0)}
    (found,) = examine_listing(LISTING, known, {gpu.name: TILES for gpu in GPUS})
    assert not found.loops
    assert "no loop does 8 LDG.E.128, 32 MUFU.EX2" in found.problems[0]


# ---- the committed bounds ----

KEY = ("some_kernel<8>", "90a", "decode")


def bounds_of(share: float) -> dict[tuple[str, str, str], dict[str, Bound]]:
    return {KEY: {"H100": Bound(share, "issue")}}


def test_a_fallen_bound_fails() -> None:
    changes = compare(bounds_of(0.78), bounds_of(0.80), {"90a"})
    assert changes.problems == [
        "some_kernel<8> (sm_90a, decode): the bound on H100 fell from 0.800 to 0.780 (issue binds)"
    ]
    unchanged = compare(bounds_of(0.79), bounds_of(0.80), {"90a"})
    assert not unchanged.problems
    assert not unchanged.notes


def test_a_risen_bound_is_noted() -> None:
    changes = compare(bounds_of(0.9), bounds_of(0.8), {"90a"})
    assert not changes.problems
    assert "rose from 0.800 to 0.900" in changes.notes[0]


def test_new_and_missing_kernels_fail() -> None:
    assert "no committed bound" in compare(bounds_of(0.8), {}, {"90a"}).problems[0]
    assert "was not found" in compare({}, bounds_of(0.8), {"90a"}).problems[0]
    assert not compare({}, bounds_of(0.8), {"80"}).problems  # it was not built


def test_bounds_survive_their_file(tmp_path: Path) -> None:
    bounds = bounds_of(0.1234) | {("gemm", "80", ""): {"A100": Bound(0.5, "tensor", 156.0)}}
    write_bounds(bounds, tmp_path / "bounds.json")
    assert read_bounds(tmp_path / "bounds.json") == bounds
    assert read_bounds()  # of the repository


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_committed_bounds_are_of_the_declared_rounds() -> None:
    tiles = compile_tiles()
    committed: dict[tuple[str, str], set[str]] = {}
    for kernel, arch, mode in read_bounds():
        committed.setdefault((kernel, arch), set()).add(mode)
    for (kernel, arch), modes in committed.items():
        gpu = next(gpu for gpu in GPUS if gpu.arch == arch)
        assert {work.mode for work in rounds_of(kernel, tiles[gpu.name]) or []} == modes
