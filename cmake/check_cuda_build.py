"""What the compiler made of the CUDA kernels: ``python cmake/check_cuda_build.py [BUILD_FOLDER]`` after ``make cuda``.

Prints a table of every kernel and architecture, and fails where the compiler warned, registers were spilled, a matrix
product does without tensor cores or loses its operands too early, or a kernel that moves data never moves 16 bytes at
once. Registers and spills come from ptxas's own statistics (cmake/compile_log.py keeps them), instructions from the
machine code, which needs cuobjdump and nvdisasm (the extra "cuda", or a toolkit).

A second table has the upper bound of each main loop's speed (cmake/machine_code). It fails where a bound is more than
2 % below the committed one, or has none; ``--update`` commits what it finds, and docs/update_bounds.py then updates
docs/performance.md.
"""

import argparse
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path

from machine_code import record
from machine_code.disassembly import find_disassembler, short_names
from machine_code.examine import Compiled, Examined, examine_object
from machine_code.report import EXPLANATION, table_rows
from machine_code.tiles import compile_tiles

from fastinfer.utils.table import format_table

ROOT = Path(__file__).parent.parent

# Kernels that may spill, by the start of their short name: the most bytes of stores and loads, and the reason.
SPILLS_ALLOWED: dict[str, tuple[int, str]] = {
    "paged_attention_kernel": (240, "32 rows of sums and logits fill the registers"),
    "gemm_kernel<GemmKernel<": (36, "two blocks share a multiprocessor's registers"),
    "gated_delta_rule_kernel": (68, "two blocks, which also prepare decays of channels, share the registers"),
    "mamba2_scan_kernel": (136, "two blocks, which also prepare tokens, share a multiprocessor's registers"),
    "all_reduce_add_rms_norm_kernel": (24, "loads of four vectors from eight ranks are under way"),
}

# Kernels that must use tensor cores: the start of their name to the machine instructions, of which they have one.
TENSOR_CORES = {
    "paged_attention_kernel": ("HMMA",),
    "paged_latent_attention_kernel": ("HMMA",),
    "gemm_kernel": ("HMMA", "HGMMA"),
    "score_tokens_kernel": ("HMMA",),
    "w8a8_gemm_kernel": ("IMMA", "IGMMA"),
}

# ptxas says with one of these numbers that it makes products of a warpgroup wait for each other.
SERIALISED = re.compile(r"\(C75\d\d\)")

# Kernels without 16-byte loads, by the start of their name, with the reason. Of the others one variant must have them;
# the other variants are for rows that are not aligned.
NARROW_LOADS: dict[str, str] = {
    "choose_tokens_kernel": "a thread per score, so that slots are written in order",
    "dequantize_kernel": "gathers a few rows a step: bound by latency",
    "expand_kernel": "a thread per column, so that a few rows of B spread over all multiprocessors",
    "gated_norm_kernel": "a head is a few elements per lane, in any row stride",
    "scan_norm_kernel": "its input is in the L2, and a group of heads is a few elements per thread",
    "head_rows_kernel": "reads nothing",
    "local_ids_kernel": "a thread per token",
    "pack_kernel": "runs once, when a model is loaded",
    "paged_attention_plan_kernel": "reads a few integers of each sequence",
    "route_experts_kernel": "reads a few logits of each token, in any row stride",
    "select_pages_kernel": "a lane per token, whose words lie beside each other",
}


@dataclass
class Kernel:
    """One kernel for one architecture."""

    symbol: str
    arch: str
    registers: int = 0
    static_shared: int = 0
    stack: int = 0
    spills: int = 0
    opcodes: dict[str, int] = field(default_factory=dict)
    wide_loads: int = 0
    name: str = ""
    examined: Examined | None = None

    @property
    def base_name(self) -> str:
        return self.name.partition("<")[0]


def build_folder() -> Path:
    folders = sorted(ROOT.glob("build/*/CMakeFiles/cuda_kernels.dir"), key=lambda folder: folder.stat().st_mtime)
    if not folders:
        sys.exit("no CUDA build found under build/: run make cuda")
    return folders[-1].parent.parent


def parse_log(text: str) -> Iterator[Kernel]:
    """The kernels in ptxas's statistics, which nvcc prints one architecture after the other."""
    for part in text.split("ptxas info    : Compiling entry function ")[1:]:
        head = re.match(r"'(\w+)' for 'sm_(\w+)'", part)
        frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part)
        used = re.search(r"Used (\d+) registers", part)
        if head is None or frame is None or used is None:
            sys.exit(f"ptxas's statistics are not understood:\n{part[:600]}")
        shared = re.search(r"(\d+) bytes smem", part)
        yield Kernel(
            symbol=head[1],
            arch=head[2],
            registers=int(used[1]),
            static_shared=int(shared[1]) if shared else 0,
            stack=int(frame[1]),
            spills=int(frame[2]) + int(frame[3]),
        )


def kernel_problems(kernels: list[Kernel]) -> Iterator[str]:
    groups: dict[tuple[str, str], list[Kernel]] = {}
    for kernel in kernels:
        groups.setdefault((kernel.base_name, kernel.arch), []).append(kernel)
        most = max((most for start, (most, _) in SPILLS_ALLOWED.items() if kernel.name.startswith(start)), default=0)
        if kernel.spills > most:
            yield f"{kernel.name} (sm_{kernel.arch}) spills registers: {kernel.spills} bytes of stores and loads"
    for (name, arch), variants in groups.items():
        instructions = next((ops for start, ops in TENSOR_CORES.items() if name.startswith(start)), None)
        if instructions is not None:
            yield from (
                f"{kernel.name} (sm_{arch}) has no {' or '.join(instructions)} instruction"
                for kernel in variants
                if kernel.opcodes.keys().isdisjoint(instructions)
            )
        if not name.startswith(tuple(NARROW_LOADS)) and not any(kernel.wide_loads for kernel in variants):
            yield f"{name} (sm_{arch}) loads no 16 bytes at once in any of its {len(variants)} variants"


def examine(kernels: dict[tuple[str, str], Kernel], objects: list[Path]) -> Iterator[Examined]:
    """Read the machine code of the objects, the largest first, on all cores."""
    disassembler, tiles = find_disassembler(), compile_tiles()
    known = {key: Compiled(kernel.name, kernel.registers, kernel.static_shared) for key, kernel in kernels.items()}
    objects = sorted(objects, key=lambda obj: obj.stat().st_size, reverse=True)
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for results in pool.map(examine_object, objects, repeat(disassembler), repeat(known), repeat(tiles)):
            yield from results


def compare_bounds(bounds: record.Bounds, update: bool) -> record.Changes:
    """Compare with the committed bounds, or commit these; those of architectures that were not built stay."""
    archs = {arch for _, arch, _ in bounds}
    committed = record.read_bounds(record.PATH) if record.PATH.exists() else {}
    if update:
        others = {key: value for key, value in committed.items() if key[1] not in archs}
        record.write_bounds(others | bounds, record.PATH)
        return record.Changes([], [f"{len(bounds)} bounds are in {record.PATH.relative_to(ROOT)}"])
    return record.compare(bounds, committed, archs)


def main(build: Path, update: bool = False) -> int:
    folder = build / "CMakeFiles" / "cuda_kernels.dir"
    kernels: dict[tuple[str, str], Kernel] = {}
    problems, objects = [], []
    for log in sorted(folder.rglob("*.cu.o.log")):
        if not (ROOT / log.relative_to(folder)).with_suffix("").with_suffix("").exists():
            continue  # of a source that is gone
        text = log.read_text()
        objects.append(log.with_suffix(""))
        kernels |= {(kernel.symbol, kernel.arch): kernel for kernel in parse_log(text)}
        spill = "Registers are spilled"  # judged kernel by kernel below
        problems += [line for line in text.splitlines() if re.search(r"\bwarning\b", line) and spill not in line]
        problems += [line for line in text.splitlines() if SERIALISED.search(line)]
    built = {log.relative_to(folder).with_suffix("").with_suffix("") for log in folder.rglob("*.cu.o.log")}
    sources = {path.relative_to(ROOT) for path in (ROOT / "csrc").rglob("*.cu")}
    problems += [f"{source} is not in CMakeLists.txt, or was not compiled" for source in sorted(sources - built)]
    if not kernels:
        sys.exit(f"no compiler logs in {folder}: run make cuda")
    ordered = list(kernels.values())
    for kernel, name in zip(ordered, short_names([kernel.symbol for kernel in ordered]), strict=True):
        kernel.name = name
    for found in examine(kernels, objects):
        kernel = kernels[found.symbol, found.arch]
        kernel.opcodes, kernel.wide_loads, kernel.examined = found.opcodes, found.wide_loads, found
        problems += found.problems
    ordered.sort(key=lambda kernel: (kernel.base_name, kernel.name, kernel.arch))

    rows = [
        [
            "kernel",
            "arch",
            "registers",
            "static shared",
            "stack",
            "spills",
            "instructions",
            "HMMA",
            "HGMMA",
            "IMMA",
            "IGMMA",
            "128-bit loads",
        ]
    ]
    for k in ordered:
        counts = [k.registers, k.static_shared, k.stack, k.spills, sum(k.opcodes.values())]
        counts += [*(k.opcodes.get(opcode, 0) for opcode in ("HMMA", "HGMMA", "IMMA", "IGMMA")), k.wide_loads]
        rows.append([k.name, f"sm_{k.arch}", *map(str, counts)])
    print(format_table(rows))
    problems += kernel_problems(ordered)
    for start in TENSOR_CORES:
        if not any(kernel.name.startswith(start) for kernel in ordered):
            problems.append(f"no kernel is named {start}..., which must use tensor cores")
    print(f"\n{EXPLANATION}\n")
    examined = [(kernel.name, kernel.examined) for kernel in ordered if kernel.examined is not None]
    print(format_table(list(table_rows(examined))))
    bounds = {(name, found.arch, loop.mode): loop.bounds for name, found in examined for loop in found.loops}
    changes = compare_bounds(bounds, update)
    for note in changes.notes:
        print(f"note: {note}")
    if changes.problems or (changes.notes and not update):
        print("To commit these bounds: python cmake/check_cuda_build.py --update; python docs/update_bounds.py")
    problems += changes.problems
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    print(f"{len(ordered)} kernels, {len(bounds)} main loops, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", nargs="?", type=Path, help="build folder, by default the newest with CUDA kernels")
    parser.add_argument("--update", action="store_true", help="commit the bounds that are found")
    arguments = parser.parse_args()
    sys.exit(main(arguments.build or build_folder(), arguments.update))
