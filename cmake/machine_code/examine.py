"""The bounds of all kernels of an object file."""

import contextlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from machine_code.bounds import Bound, bound_of
from machine_code.cost import Cost, cost_of
from machine_code.disassembly import Disassembler
from machine_code.gpus import GPUS
from machine_code.listing import Function, read_functions
from machine_code.operands import overwritten_operands
from machine_code.rounds import Round, rounds_of
from machine_code.tiles import Tiles
from machine_code.walk import Work, cheapest_walk

WIDE_LOAD = re.compile(r"LDG(STS)?\..*128\b")
# For sm_90a ptxas 13.0 folds a uniform part of the address in shared memory and the upper half of a cache policy into
# one pair of registers, and then writes 0 for the number of the pair. An H100 calls that an illegal instruction.
MISENCODED = re.compile(r"\[R\d+\+UR\d+[^]]*\], desc\[")


@dataclass
class LoopBounds:
    """A kernel's main loop with one of its options: its cost, and the bound on each GPU."""

    mode: str
    cost: Cost
    work: Round
    bounds: dict[str, Bound]


@dataclass
class Examined:
    """Facts from the machine code of one kernel for one architecture."""

    symbol: str
    arch: str
    opcodes: Counter[str]
    wide_loads: int
    loops: list[LoopBounds] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Compiled:
    """Facts about a kernel from the compiler's log."""

    name: str
    registers: int
    static_shared: int


Known = dict[tuple[str, str], Compiled]  # by symbol and architecture


def examine_object(obj: Path, disassembler: Disassembler, known: Known, tiles: dict[str, Tiles]) -> list[Examined]:
    return list(examine_listing(disassembler.listing(obj), known, tiles))


def examine_listing(text: str, known: Known, tiles: dict[str, Tiles]) -> Iterator[Examined]:
    for function in read_functions(text):
        if (function.symbol, function.arch) in known:
            yield examine_function(function, known[function.symbol, function.arch], tiles)


def examine_function(function: Function, compiled: Compiled, tiles: dict[str, Tiles]) -> Examined:
    opcodes = Counter(i.opcode for i in function.code)
    examined = Examined(
        function.symbol,
        function.arch,
        opcodes=Counter(opcode.partition(".")[0] for opcode in opcodes.elements()),
        wide_loads=sum(n for opcode, n in opcodes.items() if WIDE_LOAD.match(opcode)),
    )
    where = f"{compiled.name} (sm_{function.arch})"
    if function.arch == "90a" and any(
        i.opcode.startswith("LDGSTS") and MISENCODED.search(i.operands) for i in function.code
    ):
        examined.problems.append(f"{where}: ptxas has encoded a copy with a cache policy wrongly")
    for product, writer in overwritten_operands(function.code):
        examined.problems.append(
            f"{where}: {writer.opcode} at 0x{writer.address:x} overwrites operands of the product at "
            f"0x{product.address:x} before it is waited for"
        )
    gpus = [gpu for gpu in GPUS if gpu.arch == function.arch]
    if not gpus:
        return examined
    rounds = {}
    for gpu in GPUS:
        # A GPU has no bound of a tile that its policy never chooses.
        with contextlib.suppress(KeyError):
            rounds[gpu.name] = rounds_of(compiled.name, tiles[gpu.name])
    gpus = [gpu for gpu in gpus if gpu.name in rounds]
    if rounds and not gpus:
        return examined  # only GPUs of another architecture choose it
    if not rounds:
        examined.problems.append(f"{where}: tiles.cpp prints no tile of it for any GPU")
        return examined
    if None in rounds.values():
        examined.problems.append(f"{where}: rounds.py has no family for it")
        return examined
    for variants in zip(*(rounds[gpu.name] or [] for gpu in gpus), strict=True):
        costs: dict[Work, Cost] = {}
        bounds: dict[str, Bound] = {}
        for gpu, work in zip(gpus, variants, strict=True):
            if work.work not in costs:
                walk = cheapest_walk(function.code, work.work, work.straight)
                if walk is None:
                    said = ", ".join(f"{number} {pattern}" for pattern, number in work.work)
                    examined.problems.append(f"{where} {work.mode}: no loop does {said}; see rounds.py")
                    break
                costs[work.work] = cost_of(walk, work.straight)
            bounds[gpu.name] = bound_of(costs[work.work], work, gpu, compiled.registers, compiled.static_shared)
        else:
            examined.loops.append(LoopBounds(variants[0].mode, costs[variants[0].work], variants[0], bounds))
    return examined
