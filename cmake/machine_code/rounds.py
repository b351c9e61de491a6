"""Rounds: the work of a warp in one pass of each kernel's main loop.

A family is a pattern of short kernel names and a function that yields its rounds. Change a family with its kernels.
The work of a round is what the walk through the loop must contain at least: so many copies to shared memory, products,
conversions. It follows from the tile that the launch policy chooses (``tiles.cpp``), and it also selects the code of
the option that is meant. Everything else about a round is read from the machine code.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from machine_code.gpus import HMMA_FLOP, IMMA_OP
from machine_code.tiles import Tiles
from machine_code.walk import Work

COPY = 512  # bytes that a warp copies with one LDGSTS.128, or loads or stores with one LDG.128 or STG.128
GROUP = 128  # inputs with one fp16 scale
WIDE_TOKENS = 128  # from here on a product is bound by tensor cores, below by memory


@dataclass(frozen=True)
class Round:
    """One warp's share of a round."""

    work: Work
    bytes: float  # of DRAM: weights, keys and values, or elements read and written
    l2_bytes: float  # with what is read from the L2: activations, norm weights
    threads: int  # of a block
    shared: int = 0  # bytes of shared memory a block
    flop: float = 0  # of the tensor cores
    mode: str = ""  # which of the kernel's options
    straight: bool = False  # the whole kernel instead of a loop
    bound_by_tensor_cores: bool = False


RoundsOf = Callable[[re.Match[str], Tiles], Iterator[Round]]
ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "float": 4, "unsigned short": 2, "unsigned int": 4}


def gemm(name: re.Match[str], tiles: Tiles) -> Iterator[Round]:
    """A stage of the pipeline: copies of the weight's and the tokens' next chunk, and the products of this one."""
    weight_format, tokens, grouped = name["format"], int(name["tokens"]), name["grouped"] == "true"
    tile = tiles[weight_format + (" grouped" if grouped else "")][tokens]
    dense = weight_format == "Dense"
    weight = tile.rows * tile.chunk * {"Dense": 16, "Int8": 8}.get(weight_format, 4) // 8 // tile.warps
    x = tokens * tile.chunk * 2 // tile.warps
    scales = 0 if dense else tile.rows * tile.chunk // GROUP * 2 // tile.warps
    products = tile.rows * tile.chunk * tokens // (16 * 16 * 8) // tile.warps
    copies = weight // COPY + x // COPY + (not dense)
    yield Round(
        work=(("LDGSTS", copies), ("HGMMA", tile.chunk // 16) if tile.warpgroups else ("HMMA", products)),
        bytes=weight + scales,
        l2_bytes=weight + scales + x,
        flop=products * HMMA_FLOP,
        threads=tile.threads,
        shared=tile.shared,
        bound_by_tensor_cores=tokens >= WIDE_TOKENS,
    )


def w8a8_gemm(name: re.Match[str], tiles: Tiles) -> Iterator[Round]:
    tokens = int(name["tokens"])
    tile = tiles["w8a8"][tokens]
    weight, x = tile.rows * tile.chunk // tile.warps, tokens * tile.chunk // tile.warps
    products = tile.rows * tile.chunk * tokens // (16 * 32 * 8) // tile.warps
    yield Round(
        work=(
            ("LDGSTS", weight // COPY + x // COPY),
            ("IGMMA", tile.chunk // 32) if tile.warpgroups else ("IMMA", products),
        ),
        bytes=weight,
        l2_bytes=weight + x,
        flop=products * IMMA_OP,
        threads=tile.threads,
        shared=tile.shared,
        bound_by_tensor_cores=tokens >= WIDE_TOKENS,
    )


def paged_attention(name: re.Match[str], tiles: Tiles) -> Iterator[Round]:
    """A tile of keys and values, with 16 query rows that all warps share (decode) or a full tile of them (prefill)."""
    head_dim = int(name["head_dim"])
    tile = tiles["attention"][head_dim]
    elements = 2 * tile.chunk * head_dim // tile.warps  # keys and values that a warp copies
    wide = elements // 8 // 32  # vectors of eight that a lane makes from quantized ones
    # In the order of CacheQuantization: bits of an element; bits of its scales; copies of scales; and what making
    # 16-bit elements of it takes, which tells the options of one kernel apart.
    caches: list[tuple[str, int, float, int, Work]] = [
        ("16-bit KV", 16, 0, 0, ()),
        ("int8 KV", 8, 32 / head_dim, 2, (("STS.128", wide), ("H(ADD|MUL|FMA)2", 8 * wide))),
        ("fp8 KV", 8, 32 / head_dim, 2, (("STS.128", wide), ("H(ADD|MUL|FMA)2", 4 * wide))),
        ("int4 KV", 4, 1, 1, (("STS.128", wide), ("F2FP", 4 * wide))),
    ]
    if kind := name["kind"]:  # a kernel for one of them
        caches = [caches[int(kind)]]
    for phase, rows in (("decode", 16), ("prefill", tile.rows)):
        # Both products: rows by positions by head_dim, 16 x 8 x 16 each.
        products = 2 * rows * tile.chunk * head_dim // (16 * 8 * 16) // tile.warps
        exponentials = rows * tile.chunk // 32 // tile.warps
        multiplied = ("HMMA", products)
        if phase == "prefill" and tile.warpgroups:  # for each 64 rows, 16 columns of Q K^T or positions of P V at once
            multiplied = ("HGMMA", rows // 64 * (head_dim + tile.chunk) // 16)
        for cache, bits, scale_bits, scale_copies, widening in caches:
            if kind:  # decode widens in registers, prefill into shared memory
                widening = widening[:1] if phase == "prefill" else ()
            copies = elements * bits // 8 // COPY + scale_copies
            size = elements * (bits + scale_bits) / 8
            yield Round(
                work=(("LDGSTS", copies), multiplied, ("MUFU.EX2", exponentials), *widening),
                bytes=size,
                l2_bytes=size,
                flop=products * HMMA_FLOP,
                threads=tile.threads,
                shared=tile.shared,
                mode=f"{phase}, {cache}",
                bound_by_tensor_cores=phase == "prefill",
            )


def paged_latent_attention(name: re.Match[str], tiles: Tiles) -> Iterator[Round]:
    """A tile of rows that are keys and values, with a full tile of query rows, whose softmax every warp computes."""
    head_dim = int(name["head_dim"])
    tile = tiles["attention"][head_dim]
    size = tile.chunk * head_dim * 2 // tile.warps
    products = tile.rows * tile.chunk * (2 * head_dim - 64) // (16 * 8 * 16) // tile.warps
    yield Round(
        work=(("LDGSTS", size // COPY), ("HMMA", products), ("MUFU.EX2", tile.rows * tile.chunk // 32)),
        bytes=size,
        l2_bytes=size,
        flop=products * HMMA_FLOP,
        threads=tile.threads,
        shared=tile.shared,
        bound_by_tensor_cores=True,
    )


def sample(name: re.Match[str], tiles: Tiles) -> Iterator[Round]:
    """A warp's share of a part of fp32 logits without filters: its maximum and the sum of exponentials."""
    work = (("LDG.E.128", 8), ("MUFU.EX2", 32), ("FMNMX", 31))
    yield Round(work=work, bytes=8 * COPY, l2_bytes=8 * COPY, threads=256, straight=True)


def straight(loads: float, stores: float, reads: int | None = None, more: Work = (), block: int = 256) -> RoundsOf:
    """A kernel without a loop, or with one round of it, for each 16-byte vector that a thread holds.

    ``loads`` and ``stores`` are of 16 bytes and go to DRAM. ``reads`` counts all 16-byte loads; the others may find the
    L1.
    """

    def rounds(name: re.Match[str], tiles: Tiles) -> Iterator[Round]:
        held = max(int(name.groupdict().get("held") or 1), 1)
        all_loads = loads if reads is None else reads
        store = {1: "STG.E.128", 0.5: "STG.E.64", 0.25: r"STG\.E$"}[stores]
        yield Round(
            work=(("LDG.E.128", int(all_loads * held)), (store, held), *more),
            bytes=COPY * held * (loads + stores),
            l2_bytes=COPY * held * (loads + stores),
            threads=block,
            straight=True,
        )

    return rounds


def embedding(name: re.Match[str], tiles: Tiles) -> Iterator[Round]:
    count = int(name["count"])
    loads, stores = (count * ELEMENT_BYTES[name[part]] // 16 for part in ("weight", "type"))
    work = (("LDG.E.128", max(loads, 1)), ("STG.E.128", max(stores, 1)))
    size = COPY * (loads + stores)
    yield Round(work, bytes=size, l2_bytes=size, threads=256, straight=True)


def permute_columns(name: re.Match[str], tiles: Tiles) -> Iterator[Round]:
    """Gathers a vector's elements by 64-bit indices."""
    count, size = int(name["count"]), ELEMENT_BYTES[name["type"]]
    gather = r"LDG\.E\.U16" if size == 2 else r"LDG\.E(\.CONSTANT)?$"
    work = (("LDG.E.128", count // 2), (gather, count), ("STG.E.128", 1))
    yield Round(work, bytes=2 * COPY, l2_bytes=2 * COPY, threads=256, straight=True)


def causal_conv1d(name: re.Match[str], tiles: Tiles) -> Iterator[Round]:
    """A token: its inputs and those before it, which are in the L1, and the result."""
    count, kernel = int(name["count"]), int(name["kernel"])
    if name["gated"] == "true":
        work: Work = (("LDG.E.128", 2 * kernel + 1), ("STG.E.128", 1))
        yield Round(work, bytes=4 * COPY, l2_bytes=4 * COPY, threads=128)
        return
    work = (("LDG.E.128", kernel), ("STG.E.128", 1), ("MUFU.EX2", count))
    yield Round(work, bytes=2 * COPY, l2_bytes=2 * COPY, threads=128)


def gated_delta_rule(name: re.Match[str], tiles: Tiles) -> Iterator[Round]:
    """A decode step of a head of 128: a warp's eight columns of the state are read and written."""
    moves = 8
    size = 2 * moves * COPY
    work = ((r"LDG\.E\.NA\..*128", moves), (r"STG\.E\.EF\.128", moves))
    yield Round(work, bytes=size, l2_bytes=size, threads=128, shared=20_224, straight=True)


def mamba2_scan(name: re.Match[str], tiles: Tiles) -> Iterator[Round]:
    """A decode step of a head of 64 with 128 rows: like the delta rule's, with more shared memory."""
    moves = 8
    size = 2 * moves * COPY
    work = ((r"LDG\.E\.NA\..*128", moves), (r"STG\.E\.EF\.128", moves))
    yield Round(work, bytes=size, l2_bytes=size, threads=128, shared=22_720, straight=True)


def combine_experts(name: re.Match[str], tiles: Tiles) -> Iterator[Round]:
    """Adds up a token's rows; one that the loop reads is a round."""
    yield Round((("LDG.E.128", 1),), bytes=COPY, l2_bytes=COPY, threads=256)


# A lane's part of a head of 128: the norm's scale, and the cosines and sines of four pairs.
ROTATED_HEAD: Work = (("MUFU.RSQ", 1), (r"LDG\.E(\.\w*CONSTANT)?$", 8))
TYPE = "(?P<type>bf16|fp16|float|unsigned short|unsigned int)"
FAMILIES: list[tuple[str, RoundsOf]] = [
    (r"gemm_kernel<Gemm\w*Kernel<(?P<format>\w+?)Weight<\w+>, \w+, (?P<tokens>\d+), (?P<grouped>true|false)", gemm),
    (r"w8a8_gemm_kernel<(?P<tokens>\d+)>", w8a8_gemm),
    (r"paged_attention_kernel<\w+, ((?P<kind>\d), )?(?P<head_dim>\d+)>", paged_attention),
    (r"paged_latent_attention_kernel<\w+, (?P<head_dim>\d+)>", paged_latent_attention),
    (r"sample_kernel", sample),
    (rf"activation_and_mul_kernel<{TYPE}, (true|false), [48]>", straight(2, 1)),
    (rf"combine_experts_kernel<{TYPE}, [48]>", combine_experts),
    (rf"embedding_kernel<(?P<weight>\w+), {TYPE}, (?P<count>[48])>", embedding),
    (r"causal_conv1d_kernel<\w+, (?P<count>[48]), (?P<kernel>\d), (?P<gated>true|false)>", causal_conv1d),
    (r"gated_delta_rule_kernel<\w+, 128, false, false>", gated_delta_rule),
    (r"mamba2_scan_kernel<\w+, 128, false>", mamba2_scan),
    (rf"sigmoid_gate_kernel<{TYPE}, false, (true|false), [48]>", straight(2, 1)),
    (rf"sigmoid_gate_kernel<{TYPE}, true, (true|false), [48]>", straight(1, 1)),
    (r"relu2_kernel<\w+, [48]>", straight(1, 1)),
    (r"xielu_kernel<\w+, [48]>", straight(1, 1)),
    (r"softcap_kernel<\w+, [48]>", straight(1, 1)),
    (rf"permute_columns_kernel<{TYPE}, (?P<count>[48])>", permute_columns),
    (r"merge_attention_states_kernel<\w+, [48]>", straight(2, 1)),
    (r"rotary_embedding_kernel<\w+16, 8>", straight(1, 1, reads=6)),
    (r"layer_norm_kernel<\w+, [48], (?P<held>[14])>", straight(1, 1, reads=3)),
    (r"layer_norm_kernel<\w+, [48], 0>", straight(1, 1, reads=5)),
    (r"rms_norm_kernel<\w+, [48], (?P<held>[14]), false>", straight(1, 1, reads=2)),
    (r"rms_norm_kernel<\w+, [48], 0, false>", straight(1, 1, reads=3)),
    (r"rms_norm_kernel<\w+, 8, (?P<held>[14]), true>", straight(1, 0.5, reads=2)),
    (r"rms_norm_kernel<\w+, 4, (?P<held>[14]), true>", straight(1, 0.25, reads=2)),
    (r"rms_norm_kernel<\w+, 8, 0, true>", straight(1, 0.5, reads=5)),
    (r"rms_norm_kernel<\w+, 4, 0, true>", straight(1, 0.25, reads=5)),
    (r"quantize_int8_kernel<\w+, 8>", straight(1, 0.5, reads=2)),
    (r"quantize_int8_kernel<float, 4>", straight(1, 0.25, reads=2)),
    (r"store_kv_cache_kernel<\w+16, 8>", straight(1, 1)),
    (r"norm_rotary_store_kernel<\w+16, 8>", straight(1, 1, reads=2, more=ROTATED_HEAD)),
]

# Kernels without bounds, by patterns of their names, with the reason.
UNMODELLED = {
    r"\w+_kernel<.*, 1(, 0.*)?>$|causal_conv1d_kernel<\w+, 1, ": "for rows that are not aligned: single elements",
    r"(rotary_embedding|store_kv_cache|norm_rotary_store)_kernel<float, 4>": "fp32 is for tests",
    r"dequantize_kernel": "gathers a few rows a step: bound by latency",
    r"expand_kernel": "an element of B a lane: how many sums it enters depends on the tokens' adapters",
    r"shrink_kernel": "the loop of its norm looks like that of its product",
    r"expert_tiles_kernel": "a warp that reads a number per expert",
    r"(gated_delta_rule|mamba2_scan)_kernel<\w+, \d+, true(, \w+)?>": "a prompt's tokens in turn: bound by latency",
    r"(gated_delta_rule|mamba2_scan)_kernel<\w+, 256, false(, \w+)?>": "like that of 128 rows",
    r"gated_delta_rule_kernel<\w+, 128, false, true>": "like that of one decay for a head",
    r"(gated|scan)_norm_kernel": "reads what the kernel before has left in the L2",
    r"pack_kernel": "runs once, when a model is loaded",
    r"(head_rows|local_ids)_kernel": "writes an integer a row",
    r"all_(gather|gather_rows|reduce|reduce_add_rms_norm)_kernel": "waits for other GPUs, and reads over their links",
    r"latent_rotary_store_kernel": "a warp copies a query or stores a row, whose loops are alike",
    r"paged_attention_plan_kernel": "reads a few integers of each sequence",
    r"route_experts_kernel": "reads a few logits of each token",
    r"select_pages_kernel": "multiplies a page's codes with any number of heads, in a loop over these",
    r"score_tokens_kernel": "multiplies keys with any number of heads, in a loop over these",
    r"choose_tokens_kernel": "reads a token's scores five times, from the L2 or memory",
    r"store_key_codes_kernel": "reads a key, and rotates it in shared memory",
    r"sort_rows_kernel": "reads a number per token and expert",
    r"zero_counters_kernel": "reads nothing",
}


def rounds_of(name: str, tiles: Tiles) -> list[Round] | None:
    """Return the rounds of the kernel with this short name; None if no family has it and it is not excepted either."""
    for pattern, rounds in FAMILIES:
        if match := re.match(pattern, name):
            return list(rounds(match, tiles))
    return [] if any(re.match(pattern, name) for pattern in UNMODELLED) else None
