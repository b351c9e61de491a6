"""Registers that products of a warpgroup read while the warps go on."""

import re
from collections.abc import Iterator

from machine_code.control_flow import EXIT, Block, find_blocks
from machine_code.listing import Instruction

# HGMMA.64x128x16.F32 R24, R88, gdesc[UR20], R24, gsb0: of the operands in R88 to R91; gsb0 ends a group.
FRAGMENTS = re.compile(r"R\d+, R(\d+), gdesc")
WAIT = "WARPGROUP.DEPBAR"
# Their first operand is a register that they read.
READERS = ("BRX", "JMX", "RET", "BAR", "WARPSYNC", "NANOSLEEP", "R2B")
# Registers of a result, at most.
WIDTHS = [(r"\.128|^LDSM.*\.4|^[HI]MMA", 4), (r"\.64|WIDE|^D[A-Z]|^CS2R(?!\.32)|^LDSM.*\.2", 2), ("", 1)]
MOST_GROUPS = 8


def overwritten_operands(code: list[Instruction]) -> Iterator[tuple[Instruction, Instruction]]:
    """Yield products with fragments in registers, each with an instruction that overwrites these before a wait for it.

    ptxas 13.0 lets this happen.
    """
    blocks = find_blocks(code)
    for address, block in blocks.items():
        for index, product in enumerate(block.code):
            match = FRAGMENTS.match(product.operands)
            if "GMMA" in product.opcode and match:
                registers = set(range(int(match[1]), int(match[1]) + 4))
                if (writer := find_writer(blocks, address, index, registers)) is not None:
                    yield product, writer


def find_writer(blocks: dict[int, Block], address: int, index: int, registers: set[int]) -> Instruction | None:
    """Return an instruction that writes one of the registers before the product is waited for, on any path."""
    waiting = [(address, index, 0)]  # block, instruction, and groups that have ended since, with the product's own
    seen = set()
    while waiting:
        address, index, groups = waiting.pop()
        for instruction in blocks[address].code[index:]:
            if instruction.opcode.startswith(WAIT):
                if groups > int(instruction.operands.rpartition(",")[2], 16):
                    break
            elif "GMMA" in instruction.opcode:
                groups = min(groups + ("gsb0" in instruction.operands), MOST_GROUPS)
            elif registers & written(instruction):
                return instruction
        else:
            for successor in blocks[address].successors - {EXIT}:
                if (successor, groups) not in seen:
                    seen.add((successor, groups))
                    waiting.append((successor, 0, groups))
    return None


def written(instruction: Instruction) -> set[int]:
    """Return the registers that an instruction writes; products aside."""
    operands = re.sub(r"^P\w+, ", "", instruction.operands) if "SHFL" in instruction.opcode else instruction.operands
    match = re.match(r"R(\d+)\b", operands)
    if match is None or instruction.opcode.startswith(READERS):
        return set()
    opcode = instruction.opcode
    return set(range(int(match[1]), int(match[1]) + next(n for pattern, n in WIDTHS if re.search(pattern, opcode))))
