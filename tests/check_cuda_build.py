"""What the compiler made of the CUDA kernels: ``python tests/check_cuda_build.py [BUILD_FOLDER]`` after ``make cuda``.

Prints a table of every kernel and architecture, and fails where the compiler warned, registers were spilled, a matrix
product does without tensor cores, or a kernel that moves data never moves 16 bytes at once. Registers and spills come
from ptxas's own statistics (cmake/compile_log.py keeps them), instructions from the machine code, which needs cuobjdump
and nvdisasm (the extra "cuda", or a toolkit).
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from fastinfer.utils.table import format_table

ROOT = Path(__file__).parent.parent

# Kernels that may spill, by the start of their short name, with the reason.
SPILLS_ALLOWED: dict[str, str] = {}

# Kernels that must use tensor cores: the start of their name to the machine instruction.
TENSOR_CORES = {
    "paged_attention_kernel": "HMMA",
    "gemm_kernel": "HMMA",
    "w8a8_gemm_kernel": "IMMA",
}

# Kernels without 16-byte loads, by the start of their name, with the reason. Of the others one variant must have them;
# the other variants are for rows that are not aligned.
NARROW_LOADS: dict[str, str] = {
    "dequantize_kernel": "gathers a few rows a step: bound by latency",
    "expert_tiles_kernel": "a warp that reads a number per expert",
    "expand_kernel": "a thread per column, so that a few rows of B spread over all multiprocessors",
    "pack_kernel": "runs once, when a model is loaded",
    "paged_attention_plan_kernel": "reads a few integers of each sequence",
    "route_experts_kernel": "reads a few logits of each token, in any row stride",
    "sort_rows_kernel": "reads a number per token and expert",
    "zero_counters_kernel": "reads nothing",
}

WIDE_LOAD = re.compile(r"\bLDG(STS)?\.[A-Z0-9._]*128\b")


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

    @property
    def base_name(self) -> str:
        return self.name.partition("<")[0]


def build_folder() -> Path:
    folders = sorted(ROOT.glob("build/*/CMakeFiles/cuda_kernels.dir"), key=lambda folder: folder.stat().st_mtime)
    if not folders:
        sys.exit("no CUDA build found under build/: run make cuda")
    return folders[-1].parent.parent


def find_tool(name: str) -> str | None:
    """cuobjdump or nvdisasm: on the PATH, in the toolkit or in a pip package."""
    package = importlib.util.find_spec("nvidia")
    folders = [Path(folder) / "cu13" / "bin" for folder in package.submodule_search_locations or []] if package else []
    places = [os.environ.get("PATH", ""), "/usr/local/cuda/bin", *map(str, folders)]
    return shutil.which(name, path=os.pathsep.join(places))


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


def count_instructions(kernels: dict[tuple[str, str], Kernel], sass: str) -> None:
    arch, kernel = "", None
    for line in sass.splitlines():
        if found := re.match(r"\s*arch = sm_(\w+)", line):
            arch = found[1]
        elif found := re.match(r"\s*Function : (\S+)", line):
            kernel = kernels.get((found[1], arch))
        elif kernel is not None and (found := re.match(r"\s*/\*\w+\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)", line)):
            kernel.opcodes[found[1]] = kernel.opcodes.get(found[1], 0) + 1
            kernel.wide_loads += WIDE_LOAD.search(line) is not None


def disassemble(obj: Path, cuobjdump: str, nvdisasm: str) -> str:
    path = os.pathsep.join([str(Path(nvdisasm).parent), os.environ["PATH"]])  # cuobjdump calls nvdisasm
    run = subprocess.run(
        [cuobjdump, "-sass", str(obj)], capture_output=True, text=True, env=os.environ | {"PATH": path}
    )
    if run.returncode:
        sys.exit(f"cuobjdump {obj}: {run.stderr.strip()}")
    return run.stdout


# Patterns to drop or abbreviate in a demangled name, in this order.
ABBREVIATIONS = [
    (r"\(anonymous namespace\)::|fastinfer::|cuda::|^void ", ""),
    (r"\(\w[\w ]*\)(?=-?\d)", ""),  # the type of a template argument: (int)8
    (r"\((?:[^()]|\([^()]*\))*\)$", ""),  # parameters
    ("__nv_bfloat16", "bf16"),
    ("__half", "fp16"),
    ("> >", ">>"),
]


def short_names(symbols: list[str]) -> list[str]:
    """Names without namespaces and parameters, as ``rms_norm_kernel<float, fp16, 8>``."""
    names = subprocess.run(["c++filt"], input="\n".join(symbols), capture_output=True, text=True, check=True).stdout
    for pattern, short in ABBREVIATIONS:
        names = re.sub(pattern, short, names, flags=re.MULTILINE)
    return names.splitlines()


def kernel_problems(kernels: list[Kernel]) -> Iterator[str]:
    groups: dict[tuple[str, str], list[Kernel]] = {}
    for kernel in kernels:
        groups.setdefault((kernel.base_name, kernel.arch), []).append(kernel)
        if kernel.spills and not kernel.name.startswith(tuple(SPILLS_ALLOWED)):
            yield f"{kernel.name} (sm_{kernel.arch}) spills registers: {kernel.spills} bytes of stores and loads"
    for (name, arch), variants in groups.items():
        instruction = next((op for start, op in TENSOR_CORES.items() if name.startswith(start)), None)
        if instruction is not None:
            yield from (
                f"{kernel.name} (sm_{arch}) has no {instruction} instruction"
                for kernel in variants
                if instruction not in kernel.opcodes
            )
        if not name.startswith(tuple(NARROW_LOADS)) and not any(kernel.wide_loads for kernel in variants):
            yield f"{name} (sm_{arch}) loads no 16 bytes at once in any of its {len(variants)} variants"


def main(build: Path) -> int:
    folder = build / "CMakeFiles" / "cuda_kernels.dir"
    tools = find_tool("cuobjdump"), find_tool("nvdisasm")
    if None in tools:
        sys.exit("cuobjdump and nvdisasm are needed: pip install 'fastinfer[cuda]'")
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
    built = {log.relative_to(folder).with_suffix("").with_suffix("") for log in folder.rglob("*.cu.o.log")}
    sources = {path.relative_to(ROOT) for path in (ROOT / "csrc").rglob("*.cu")}
    problems += [f"{source} is not in CMakeLists.txt, or was not compiled" for source in sorted(sources - built)]
    if not kernels:
        sys.exit(f"no compiler logs in {folder}: run make cuda")
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for sass in pool.map(lambda obj: disassemble(obj, *tools), objects):  # type: ignore[arg-type]
            count_instructions(kernels, sass)
    ordered = list(kernels.values())
    for kernel, name in zip(ordered, short_names([kernel.symbol for kernel in ordered]), strict=True):
        kernel.name = name
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
            "IMMA",
            "128-bit loads",
        ]
    ]
    for k in ordered:
        counts = [k.registers, k.static_shared, k.stack, k.spills, sum(k.opcodes.values())]
        counts += [k.opcodes.get("HMMA", 0), k.opcodes.get("IMMA", 0), k.wide_loads]
        rows.append([k.name, f"sm_{k.arch}", *map(str, counts)])
    print(format_table(rows))
    problems += kernel_problems(ordered)
    for start in TENSOR_CORES:
        if not any(kernel.name.startswith(start) for kernel in ordered):
            problems.append(f"no kernel is named {start}..., which must use tensor cores")
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    print(f"{len(ordered)} kernels, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else build_folder()))
