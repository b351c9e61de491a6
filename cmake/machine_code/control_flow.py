"""Basic blocks of a kernel, and its loops."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from machine_code.listing import Instruction

EXIT = -1  # the successor of a block whose threads end
ENDS = ("BRA", "BRX", "JMP", "EXIT", "RET")


@dataclass
class Block:
    """Instructions that are executed one after the other, and the addresses of the blocks that may follow."""

    code: list[Instruction] = field(default_factory=list)
    successors: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Loop:
    """A natural loop: its first block, and all blocks from which that can be reached again without leaving."""

    head: int
    body: frozenset[int]


def branch_target(instruction: Instruction) -> int | None:
    if not instruction.opcode.startswith(("BRA", "JMP", "CALL.REL")):
        return None
    target = re.search(r"0x([0-9a-f]+)", instruction.operands)
    return int(target[1], 16) if target else None


def falls_through(instruction: Instruction) -> bool:
    """Whether the next instruction may follow. A branch may name its condition among its operands: BRA !UP0, 0x70."""
    if not instruction.opcode.startswith(ENDS) or instruction.predicate:
        return True
    return instruction.opcode.startswith(("BRA.DIV", "BRA.CONV")) or bool(re.match(r"!?U?P\d", instruction.operands))


def find_blocks(code: list[Instruction]) -> dict[int, Block]:
    """Return the blocks by their addresses.

    Both the target and the next instruction follow a call: the compiler calls its own functions, which end in RET and
    are slow paths, and on sm_80 it also uses calls for far branches.
    """
    leaders = {code[0].address}
    for instruction, following in zip(code, [*code[1:], None], strict=True):
        if (target := branch_target(instruction)) is not None:
            leaders.add(target)
        if following is not None and instruction.opcode.startswith((*ENDS, "CALL")):
            leaders.add(following.address)
    blocks: dict[int, Block] = {}
    block = Block()
    for instruction in code:
        if instruction.address in leaders:
            if block.code and falls_through(block.code[-1]):
                block.successors.add(instruction.address)
            block = blocks[instruction.address] = Block()
        block.code.append(instruction)
        if (target := branch_target(instruction)) is not None:
            block.successors.add(target)
        elif instruction.opcode.startswith("EXIT"):
            block.successors.add(EXIT)
    add_jump_tables(blocks)
    return blocks


def add_jump_tables(blocks: dict[int, Block]) -> None:
    """Let an indirect jump lead to the blocks behind it, up to the next one, to which nothing else leads."""
    jumps = [address for address, block in blocks.items() if block.code[-1].opcode.startswith("BRX")]
    known = set().union(*(block.successors for block in blocks.values()))
    for jump, end in zip(jumps, [*jumps[1:], max(blocks) + 1], strict=False):
        blocks[jump].successors |= {address for address in blocks if jump < address < end and address not in known}


def find_loops(blocks: dict[int, Block]) -> Iterator[Loop]:
    """Yield the loops, small ones first. The compiler puts a loop's head before the rest of it."""
    predecessors: dict[int, set[int]] = {}
    for address, block in blocks.items():
        for successor in block.successors:
            predecessors.setdefault(successor, set()).add(address)
    loops = []
    for head in blocks:
        body = {head}
        waiting = [address for address in predecessors.get(head, ()) if address >= head]
        if not waiting:
            continue
        while waiting:
            address = waiting.pop()
            if address not in body:
                body.add(address)
                waiting += predecessors.get(address, ())
        loops.append(Loop(head, frozenset(body)))
    yield from sorted(loops, key=lambda loop: sum(len(blocks[address].code) for address in loop.body))
