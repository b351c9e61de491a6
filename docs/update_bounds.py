"""Writes the table of CUDA kernels in docs/performance.md: ``python docs/update_bounds.py``.

It shows goals beside the upper bounds that ``make cuda`` found in the machine code (cmake/machine_code/bounds.json),
and what an H100 reached (bench/results/h100).
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS), str(DOCS.parent / "cmake")]

from machine_code.bounds import Bound  # noqa: E402
from machine_code.gpus import GPUS  # noqa: E402
from machine_code.record import Bounds, read_bounds  # noqa: E402
from measurements import Measured  # noqa: E402

PAGE = DOCS / "performance.md"
BLOCK = re.compile(r"(?<=<!-- bounds -->\n).*?(?=<!-- end of bounds -->)", re.DOTALL)


@dataclass(frozen=True)
class Row:
    """Kernels that share a row: a pattern of their names, and one of their options. The highest bound is shown."""

    label: str
    kernel: str
    gate: str = "-"
    mode: str = ""
    measured: Measured | None = None


def product(label: str, weight: str, tokens: int, gate: str = "-", grouped: bool = False, measured: str = "") -> Row:
    """Return the row of a product, of which cases with this pattern of token numbers are measured."""
    experts, kernel = str(grouped).lower(), rf"gemm_kernel<Gemm\w*Kernel<{weight}Weight<bf16>, bf16, {tokens}, "
    return Row(label, kernel + experts, gate, measured=of_tokens(weight, measured) if measured else None)


def of_tokens(weight: str, tokens: str) -> Measured:
    return Measured(*BENCHMARKS[weight], rf"M=({tokens}) N=")


def decode(cases: str) -> Measured:
    return Measured("paged_attention", "fastinfer", rf"decode, \d+ x {cases}")


# Benchmark and candidate by kind of weight.
BENCHMARKS = {
    "Dense": ("gemm", "fastinfer"),
    "Int4": ("int4_gemm", "fastinfer"),
    "Int8": ("int8_gemm", "int8_gemm"),
    "W8A8": ("int8_gemm", "w8a8_gemm"),
}
WIDE_GATE = "0.80 of cuBLAS in bf16: 640 TFLOP/s on an H100"
ATTENTION = r"paged_attention_kernel<bf16, (\d, )?128>"
ROWS = [
    product("`int4_gemm`, up to 8 tokens", "Int4", 8, "0.55 of copy, 0.80 from 100 MB", measured="1"),
    product("`int4_gemm`, 16", "Int4", 16, "0.55 of copy, 0.80 from 100 MB", measured="16"),
    product("`int4_gemm`, 32", "Int4", 32, "the best peer's speed", measured="32"),
    product("`int4_gemm`, 64", "Int4", 64, "the best peer's speed", measured="64"),
    product("`int4_gemm`, 128", "Int4", 128),
    product("`int4_gemm`, 256 and more", "Int4", 256, WIDE_GATE, measured="1024|4096"),
    product("`int4_gemm` of experts, 8", "Int4", 8, grouped=True),
    product("`int4_gemm` of experts, 32", "Int4", 32, grouped=True),
    product("`int4_gemm` of experts, 128", "Int4", 128, grouped=True),
    product("`int8_gemm`, 8", "Int8", 8, measured="1"),
    product("`int8_gemm`, 16", "Int8", 16, measured="16"),
    product("`int8_gemm`, 32", "Int8", 32),
    product("`int8_gemm`, 64", "Int8", 64, measured="64"),
    product("`int8_gemm`, 128", "Int8", 128),
    product("`int8_gemm`, 256 and more", "Int8", 256, measured="1024|8192"),
    product("`lut_gemm`, 8", "Lut", 8),
    product("`lut_gemm`, 64", "Lut", 64),
    product("`lut_gemm`, 128", "Lut", 128),
    product("`lut_gemm`, 256 and more", "Lut", 256),
    product("`gemm`, 8", "Dense", 8, "0.85 of copy, as a decode step", measured="1"),
    product("`gemm`, 64", "Dense", 64, measured="64"),
    product("`gemm`, 128", "Dense", 128),
    product("`gemm`, 256 and more", "Dense", 256, "0.95 of cuBLAS: 760 TFLOP/s on an H100", measured="1024|8192"),
    Row("`w8a8_gemm`, 8", r"w8a8_gemm_kernel<8>", measured=of_tokens("W8A8", "1")),
    Row("`w8a8_gemm`, 64", r"w8a8_gemm_kernel<64>", measured=of_tokens("W8A8", "64")),
    Row("`w8a8_gemm`, 128", r"w8a8_gemm_kernel<128>"),
    Row("`w8a8_gemm`, 256 and more", r"w8a8_gemm_kernel<256>", measured=of_tokens("W8A8", "1024|8192")),
    Row("decode attention, 16-bit cache", ATTENTION, "0.90 of copy", "decode, 16-bit KV", decode(r"\d+$")),
    Row("the same, fp8", ATTENTION, "0.60 of the time with 16 bits", "decode, fp8 KV", decode(r"\d+, fp8")),
    Row("the same, int8", ATTENTION, "0.60 of the time with 16 bits", "decode, int8 KV", decode(r"\d+, int8")),
    Row("the same, int4", ATTENTION, "-", "decode, int4 KV", decode(r"\d+, int4")),
    Row(
        "prefill attention, 16-bit cache",
        ATTENTION,
        "0.80 of FlashAttention-3: 590 TFLOP/s on an H100",
        "prefill, 16-bit KV",
        Measured("paged_attention", "fastinfer", "prefill"),
    ),
    Row("the same, fp8", ATTENTION, "-", "prefill, fp8 KV"),
    Row(
        "`rms_norm`",
        r"rms_norm_kernel<bf16, 8, [14], false>",
        "0.90 of copy",
        measured=Measured("rms_norm", "fastinfer", r"rms_norm \["),
    ),
    Row(
        "`rms_norm` to int8",
        r"rms_norm_kernel<bf16, 8, [14], true>",
        "0.90 of copy",
        measured=Measured("rms_norm", "fastinfer", r"rms_norm_quantize"),
    ),
    Row(
        "`sample`, first pass",
        r"sample_kernel",
        "the speed of FlashInfer",
        measured=Measured("sample", "fastinfer", r"\d+ x \d+, greedy"),
    ),
    Row("`layer_norm`", r"layer_norm_kernel<bf16, 8, [14]>", measured=Measured("rms_norm", "fastinfer", r"layer_norm")),
    Row(
        "`activation_and_mul`",
        r"activation_and_mul_kernel<bf16, false, 8>",
        measured=Measured("activation", "fastinfer", r"\w+_and_mul"),
    ),
    Row("`rotary_embedding`", r"rotary_embedding_kernel<bf16, 8>"),
    Row(
        "`norm_rotary_store`",
        r"norm_rotary_store_kernel<bf16, 8>",
        measured=Measured("rotary_embedding", "fastinfer, fused", r"\d+ tokens"),
    ),
    Row("`store_kv_cache`", r"store_kv_cache_kernel<bf16, 8>"),
    Row("`merge_attention_states`", r"merge_attention_states_kernel<bf16, 8>"),
    Row("`quantize_int8`", r"quantize_int8_kernel<bf16, 8>"),
    Row("`sigmoid_gate`", r"sigmoid_gate_kernel<bf16, false, false, 8>"),
    Row("`causal_conv1d` of a prompt", r"causal_conv1d_kernel<bf16, 8, 4, false>"),
    Row(
        "`gated_delta_rule`, decode",
        r"gated_delta_rule_kernel<bf16, 128, false, false>",
        measured=Measured("linear_attention", "fastinfer", r"gated_delta_rule.*each: 1$"),
    ),
    Row("`softcap`", r"softcap_kernel<bf16, 8>"),
]


def table(bounds: Bounds) -> str:
    lines = [["kernel, bf16", "gate", *(gpu.name for gpu in GPUS), "H100, measured"]]
    lines.append(["---"] * len(lines[0]))
    for row in ROWS:
        found = {gpu.name: highest(bounds, row, gpu.name) for gpu in GPUS}
        lines.append([row.label, row.gate, *map(show, found.values()), show_measured(row, found["H100"])])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def highest(bounds: Bounds, row: Row, gpu: str) -> Bound | None:
    """Return the bound of a row's fastest kernel; ``None`` on a GPU that never runs it."""
    shown = [on for (name, _, mode), on in bounds.items() if re.match(row.kernel, name) and mode == row.mode]
    found = [on[gpu] for on in shown if gpu in on]
    if not shown:
        raise SystemExit(f"no committed bound is of {row.label} ({row.kernel} {row.mode})")
    return max(found, key=lambda bound: bound.share, default=None)


def show(bound: Bound | None) -> str:
    if bound is None:
        return "-"
    return f"{bound.share:.2f} {bound.binds}" if bound.tflops is None else f"{bound.tflops:.0f} TFLOP/s {bound.binds}"


def show_measured(row: Row, bound: Bound | None) -> str:
    if row.measured is None:
        return "not measured"
    return row.measured.shares() if bound is None or bound.tflops is None else row.measured.rates()


def main() -> None:
    PAGE.write_text(BLOCK.sub(lambda _: table(read_bounds()), PAGE.read_text()))


if __name__ == "__main__":
    main()
