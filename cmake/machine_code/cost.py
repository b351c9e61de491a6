"""Costs of a walk: clocks of each part of a multiprocessor."""

from collections import Counter
from dataclasses import dataclass

from machine_code.listing import Instruction
from machine_code.pipes import latency_of, pipe_of, thread_bytes
from machine_code.walk import Walk

WARP = 32


@dataclass(frozen=True)
class Cost:
    """One warp's instructions and bytes in one round."""

    instructions: float
    predicated: float  # of them: they take an issue slot, and may do nothing else
    pipes: dict[str, float]  # instructions that are executed for certain
    global_bytes: float  # through loads, stores and copies, predicated ones included
    shared_bytes: float  # through shared memory; predicated ones may not happen
    latency: float  # clocks from a round to the next if the warp runs alone


def cost_of(walk: Walk, straight: bool) -> Cost:
    certain = [i for i in walk.code if not i.predicate]
    pipes = Counter(pipe_of(i.opcode) for i in certain)
    per_round = 1 / walk.rounds
    return Cost(
        instructions=len(walk.code) * per_round,
        predicated=(len(walk.code) - len(certain)) * per_round,
        pipes={pipe: number * per_round for pipe, number in pipes.most_common()},
        global_bytes=_bytes(walk.code, "load", "store", "copy") * per_round,
        shared_bytes=_bytes(certain, "shared load", "shared store", "copy", "hgmma", "igmma") * per_round,
        latency=latency(walk, rounds=1 if straight else 2) * per_round,
    )


def _bytes(code: list[Instruction], *pipes: str) -> int:
    per_thread: int = sum(thread_bytes(i.opcode, i.operands) for i in code if pipe_of(i.opcode) in pipes)
    return WARP * per_thread


def latency(walk: Walk, rounds: int) -> int:
    """Return the clocks of the last of some rounds: later rounds wait for what earlier ones have started."""
    clock = begin = 0
    free = dict.fromkeys(range(6), 0)
    for _ in range(rounds):
        begin = clock
        for instruction in walk.code:
            clock = max([clock, *(free[board] for board in instruction.waits)])
            for board in instruction.sets:
                free[board] = max(free[board], clock + latency_of(instruction.opcode))
            clock += max(instruction.stall, 1)
    return clock - begin
