"""Which part of a multiprocessor executes an instruction, and how long its result takes."""

import re
from functools import cache

# The first pattern that matches an opcode names its pipe. Conversions between integers and floats go where special
# functions go; F2FP, which packs two floats into 16 bits each, does not.
PIPES = {
    "hgmma": r"HGMMA",
    "igmma": r"IGMMA",
    "hmma": r"HMMA",
    "imma": r"IMMA",
    "mufu": r"MUFU|F2I|I2F\b|F2F\b|POPC",
    "bf16": r"H(ADD|MUL|FMA)2\S*BF16",
    "half": r"H(ADD|MUL|FMA)2",
    "imad": r"IMAD|IDP",
    "fp32": r"FFMA|FMUL|FADD",
    "copy": r"LDGSTS",
    "barrier": r"BAR|\w*DEPBAR|MEMBAR",
    "load": r"LDG|LD\b",
    "store": r"STG|ST\b|RED|ATOMG?\b",
    "shared load": r"LDS|ATOMS",
    "shared store": r"STS",
    "shuffle": r"SHFL",
    "branch": r"BRA|BRX|JMP|EXIT|BS\w+|CALL|RET|BREAK|WARPSYNC|YIELD",
    "uniform": r"U[A-Z]\w+|R2UR|S2UR|C?S2R|LDC|NOP|VOTE",
    "alu": r".",
}

# Usual clocks until an instruction's scoreboard is free: assumptions, for the kernels' own latency. A copy's are hidden
# by the pipeline that it belongs to.
LATENCIES = {"shared load": 30, "copy": 0, "load": 500, "mufu": 24, "shuffle": 25}
OTHER_LATENCY = 24

WIDTHS = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}


@cache
def pipe_of(opcode: str) -> str:
    return next(pipe for pipe, pattern in PIPES.items() if re.match(pattern, opcode))


@cache
def latency_of(opcode: str) -> int:
    return LATENCIES.get(pipe_of(opcode), OTHER_LATENCY)


@cache
def thread_bytes(opcode: str, operands: str = "") -> int:
    """Return the bytes that an instruction moves per thread.

    LDSM.4 reads four 8 x 8 matrices of 16 bits in a warp. Four warps read the matrices of HGMMA.64x256x16 together:
    64 x 16 and 256 x 16 elements, or only the latter if registers hold the former, as they always do for IGMMA.
    """
    modifiers = opcode.split(".")[1:]
    if opcode.startswith("HGMMA"):
        rows, columns, inputs = map(int, modifiers[0].split("x"))
        in_registers = re.match(r"R\d+, R\d+", operands) is not None
        return (columns if in_registers else rows + columns) * inputs * 2 // 128
    if opcode.startswith("IGMMA"):
        _, columns, inputs = map(int, modifiers[0].split("x"))
        return columns * inputs // 128
    if opcode.startswith("LDSM"):
        return 4 * next((int(modifier) for modifier in modifiers if modifier in ("2", "4")), 1)
    return next((WIDTHS[modifier] for modifier in modifiers if modifier in WIDTHS), 4)
