"""Tables of bounds for a terminal."""

from collections.abc import Iterable, Iterator

from machine_code.bounds import Bound
from machine_code.examine import Examined, LoopBounds
from machine_code.gpus import GPUS

PIPES = ("alu", "fp32", "imad", "half", "bf16", "mufu", "uniform", "branch")
HEAD = ["main loop, a warp's round", "arch", "issued", "predicated", *PIPES, "products", "global B", "shared B"]
EXPLANATION = (
    "Upper bounds from the machine code. One round of the main loop in one warp: instructions issued, predicated\n"
    "ones among them, unpredicated ones by pipe, tensor operations, bytes of global and of shared memory. Then the\n"
    "bound: the share of the copy's bandwidth, or of the tensor peak (TFLOP/s), and what binds. Above 1 memory binds."
)


def table_rows(examined: Iterable[tuple[str, Examined]]) -> Iterator[list[str]]:
    yield [*HEAD, *(gpu.name for gpu in GPUS)]
    for name, kernel in examined:
        for loop in kernel.loops:
            yield _row(f"{name} {loop.mode}".rstrip(), kernel.arch, loop)


def _row(name: str, arch: str, loop: LoopBounds) -> list[str]:
    cost = loop.cost
    numbers = [cost.instructions, cost.predicated, *(cost.pipes.get(pipe, 0) for pipe in PIPES)]
    numbers += [
        sum(cost.pipes.get(pipe, 0) for pipe in ("hmma", "hgmma", "imma", "igmma")),
        cost.global_bytes,
        cost.shared_bytes,
    ]
    bounds = [show_bound(loop.bounds[gpu.name]) if gpu.name in loop.bounds else "" for gpu in GPUS]
    return [name, f"sm_{arch}", *(f"{number:.0f}" for number in numbers), *bounds]


def show_bound(bound: Bound) -> str:
    if bound.tflops is None:
        return f"{bound.share:.2f} {bound.binds}"
    return f"{bound.share:.2f} ({bound.tflops:.0f}) {bound.binds}"
