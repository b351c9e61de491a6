"""Writes the tables of "On an H100" in docs/performance.md: ``python docs/update_h100.py``.

A table stands between a line ``<!-- h100: NAME -->`` and a line ``<!-- end of h100 -->``, and shows bench/results/h100.
"""

import re
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from measurements import RESULTS, Case, read_cases, read_json, show_range, show_us

PAGE = Path(__file__).with_name("performance.md")
BLOCK = re.compile(r"(?<=<!-- h100: )(?P<name>\w+) -->\n.*?(?=<!-- end of h100 -->)", re.DOTALL)
Rows = list[list[str]]

SDPA = ["SDPA flash", "SDPA cuDNN"]
# Candidates that multiply by the same matrix, by heading: the benchmark and the candidate's name in it.
PRODUCTS = {
    "`gemm`, bf16": ("gemm", "fastinfer"),
    "`int4_gemm`": ("int4_gemm", "fastinfer"),
    "`int8_gemm`": ("int8_gemm", "int8_gemm"),
    "`w8a8_gemm`": ("int8_gemm", "w8a8_gemm"),
    "torch int4": ("int4_gemm", "torch int4"),
    "torch._int_mm": ("int8_gemm", "torch._int_mm"),
}
ROWS = {
    "rms_norm": r"(?P<row>[\w, ]+) \[(?P<column>\d+), 4096\]",
    "activation": r"(?P<row>\w+) \[(?P<column>\d+), 14336\]",
}
OTHERS = {
    "`norm_rotary_store`": ("rotary_embedding", "fastinfer, fused"),
    "linear attention": ("linear_attention", "fastinfer"),
    "`add_lora`": ("add_lora", "fastinfer"),
    "experts in int4": ("grouped_gemm", "fastinfer int4"),
    "experts in bf16": ("grouped_gemm", "fastinfer bf16"),
}
BENCHMARKS = ["gemm", "int4_gemm", "int8_gemm", "paged_attention", "rms_norm", "activation", "sample"]
BENCHMARKS += ["rotary_embedding", "linear_attention", "add_lora"]
OWN = ("fastinfer", "fastinfer, fused", "int8_gemm", "w8a8_gemm")
SLOWER = 0.97  # of the peer's speed; less of a difference is noise


def ceilings() -> Rows:
    runs = [read_json(name) for name in BENCHMARKS]
    copies, products = ([run["ceilings"][key] / 1e3 for run in runs] for key in ("copy_gb_per_s", "matmul_gflop_per_s"))
    machines = {(run["machine"]["gpus"][0]["name"], run["machine"]["torch"], run["date"][:10]) for run in runs}
    names, torches, dates = (", ".join(sorted(set(column))) for column in zip(*machines, strict=True))
    head = ["GPU", "torch", "date (UTC)", "copy, TB/s", "bf16 product, TFLOP/s"]
    return [head, [names, torches, dates, show_range(copies), show_range(products, 0)]]


def attention() -> Rows:
    rows = [["case", "fastinfer, us", "its rate", *(f"{name}, us" for name in SDPA), "times the fastest peer's speed"]]
    for case in read_cases("paged_attention"):
        peers = [show_us(case.timings[name]) if name in case.timings else "" for name in SDPA]
        rows.append([case.label, show_us(case.timings["fastinfer"]), rate(case), *peers, multiple(case, "fastinfer")])
    return rows


def rate(case: Case) -> str:
    share, flops = case.of_copy("fastinfer"), case.timings["fastinfer"].gflop_per_s
    return f"{share:.2f} of copy" if share is not None else f"{(flops or 0) / 1e3:.0f} TFLOP/s"


def multiple(case: Case, candidate: str) -> str:
    times = case.times_the_peer(candidate)
    return "" if times is None else f"{times:.2f}"


def products() -> Rows:
    """Speeds as multiples of cuBLAS's in bf16 in the same run, by the number of tokens."""
    found: dict[int, dict[str, list[float]]] = {}
    for heading, (benchmark, candidate) in PRODUCTS.items():
        for case in read_cases(benchmark, r"M=\d+ N="):
            (cublas,) = (timing.median_s for name, timing in case.timings.items() if "cuBLAS" in name)
            if candidate in case.timings:
                tokens = int(case.label.split()[0].removeprefix("M="))
                times = cublas / case.timings[candidate].median_s
                found.setdefault(tokens, {}).setdefault(heading, []).append(times)
    cells = [[show_range(row[name]) if name in row else "" for name in PRODUCTS] for _, row in sorted(found.items())]
    return [["tokens", *PRODUCTS], *([f"{tokens:,}", *row] for tokens, row in zip(sorted(found), cells, strict=True))]


def pivot(corner: str, patterns: dict[str, str]) -> Rows:
    """Microseconds and the multiple of the peer's speed, in the rows and columns that the labels' pattern names."""
    found: dict[str, dict[int, str]] = {}
    for benchmark, pattern in patterns.items():
        for case in read_cases(benchmark, pattern):
            place = re.match(pattern, case.label)
            assert place is not None
            times = multiple(case, "fastinfer")
            cell = show_us(case.timings["fastinfer"]) + (f" ({times}x)" if times else "")
            found.setdefault(place["row"], {})[int(place["column"])] = cell
    columns = sorted({column for row in found.values() for column in row})
    head = [corner, *(f"{column:,}" for column in columns)]
    return [head, *([name, *(row.get(column, "") for column in columns)] for name, row in found.items())]


def others() -> Rows:
    rows = [["", "case", "fastinfer, us", "times the fastest peer's speed"]]
    for name, (benchmark, candidate) in OTHERS.items():
        for case in read_cases(benchmark):
            rows.append([name, case.label, show_us(case.timings[candidate]), multiple(case, candidate)])
    return rows


def decode_step() -> Rows:
    rows = [["weights, sequences and context", "ms", "tokens/s", "of copy"]]
    for case in read_cases("decode_step"):
        seconds = case.timings["fastinfer"].median_s
        sequences = int(case.label.split(", ")[1].split()[0])
        rows.append(
            [case.label, f"{seconds * 1e3:.2f}", f"{sequences / seconds:,.0f}", f"{case.of_copy('fastinfer'):.2f}"]
        )
    return rows


def engine() -> Rows:
    weights = ["bf16", "int4"]
    runs = [read_json(f"engine_8b_{name}")["seconds"] for name in weights]
    rows = [["", *(f"{name}, tokens/s" for name in weights), *(f"{name}, ms" for name in weights)]]
    for work in runs[0]:
        seconds = [statistics.median(run[work]) for run in runs]
        tokens = int(work.split()[-1])
        rows.append([work, *(f"{tokens / s:,.0f}" for s in seconds), *(f"{s * 1e3:.2f}" for s in seconds)])
    return rows


def slower() -> Rows:
    """Show the cases in which a peer is faster."""
    rows = [["operator", "cases in which a peer is faster", "times its speed there", "slowest"]]
    for name, compared in candidates():
        behind = [(times, case.label) for times, case in compared if times < SLOWER]
        if behind:
            cell = show_range([times for times, _ in behind])
            rows.append([f"`{name}`", f"{len(behind)} of {len(compared)}", cell, min(behind)[1]])
    return rows


def candidates() -> Iterator[tuple[str, list[tuple[float, Case]]]]:
    """Yield our operators with the cases that have a peer, and the multiples of the fastest one's speed."""
    for benchmark in BENCHMARKS:
        cases = read_cases(benchmark)
        for own in OWN:
            measured = [(case.times_the_peer(own), case) for case in cases if own in case.timings]
            compared = [(times, case) for times, case in measured if times is not None]
            if compared:
                yield benchmark if own.startswith("fastinfer") else own, compared


TABLES: dict[str, Callable[[], Rows]] = {
    "ceilings": ceilings,
    "slower": slower,
    "attention": attention,
    "products": products,
    "rows": lambda: pivot("operator, tokens", ROWS),
    "sampling": lambda: pivot("filter, sequences", {"sample": r"(?P<column>\d+) x \d+, (?P<row>.*)"}),
    "others": others,
    "decode_step": decode_step,
    "engine": engine,
}


def table(name: str) -> str:
    head, *rows = TABLES[name]()
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, ["---"] * len(head), *rows))


def main() -> None:
    PAGE.write_text(BLOCK.sub(lambda block: f"{block['name']} -->\n{table(block['name'])}", PAGE.read_text()))
    print(f"{PAGE}: tables of {RESULTS}")


if __name__ == "__main__":
    main()
