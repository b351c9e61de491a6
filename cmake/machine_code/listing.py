"""Reads what ``cuobjdump -sass`` prints into functions of instructions."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

# A line of an instruction is followed by a line with the upper half of its encoding:
#   /*0070*/   @P0 LDG.E.128 R4, [R2.64] ;   /* 0x0000000402047981 */
#                                            /* 0x000ea2000c1e1d00 */
LINES = re.compile(
    r"^\s*arch = sm_(?P<arch>\w+)"
    r"|^\s*Function : (?P<symbol>\S+)"
    r"|^\s*/\*(?P<address>[0-9a-f]{4,})\*/\s+(?:@(?P<predicate>!?U?P\w+)\s+)?(?P<opcode>[A-Z][\w.]*)(?P<operands>[^;\n]*);"
    r"\s*/\*.*?\*/(?:\s*/\* 0x(?P<control>[0-9a-f]{16}) \*/)?",
    re.MULTILINE,
)
NO_SCOREBOARD = 7


class Instruction(NamedTuple):
    """A machine instruction and its scheduling, which the compiler fixes."""

    address: int
    opcode: str  # with its modifiers: LDG.E.128
    operands: str
    predicate: str  # empty if it is always executed
    stall: int  # clocks until the warp's next instruction may be issued
    sets: tuple[int, ...]  # scoreboards that the instruction releases when it has read or written its operands
    waits: tuple[int, ...]  # scoreboards that must be free before it is issued


@dataclass
class Function:
    """The machine code of one kernel for one architecture."""

    symbol: str
    arch: str
    code: list[Instruction]


def read_functions(text: str) -> Iterator[Function]:
    arch, function = "", None
    for match in LINES.finditer(text):
        if match["arch"]:
            arch = match["arch"]
        elif match["symbol"]:
            if function is not None:
                yield function
            function = Function(match["symbol"], arch, [])
        elif function is not None:
            stall, sets, waits = read_control(match["control"])
            function.code.append(
                Instruction(
                    int(match["address"], 16),
                    match["opcode"],
                    match["operands"].strip(),
                    match["predicate"] or "",
                    stall,
                    sets,
                    waits,
                )
            )
    if function is not None:
        yield function


def read_control(word: str | None) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return stall count, scoreboards to set and scoreboards to wait for.

    From bit 41 of the upper half on: stall count (4 bits), yield (1), scoreboards for the result and for the operands
    (3 each), and a mask of scoreboards to wait for (6), as Jia et al. found for Volta (https://arxiv.org/abs/1804.06826);
    the format has not changed since.
    """
    if word is None:
        return 1, (), ()
    bits = int(word, 16) >> 41
    sets = tuple(board for board in (bits >> 5 & 7, bits >> 8 & 7) if board != NO_SCOREBOARD)
    waits = tuple(board for board in range(6) if bits >> 11 >> board & 1)
    return bits & 15, sets, waits
