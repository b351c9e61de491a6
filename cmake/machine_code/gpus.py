"""The GPUs for which bounds are computed.

Sources: NVIDIA's data sheets and architecture white papers (multiprocessors, boost clocks, tensor peaks, registers,
warps, shared memory) and the table of arithmetic throughput in the CUDA C++ Programming Guide (rates: its results per
clock and multiprocessor over the 32 of a warp; for an RTX 4090 the column 8.9). The figures were written down from
memory of these and still have to be compared with them. Bandwidths of a copy, bytes read and
written, are what is usually measured: 1.5 of 1.555 TB/s, 3.0 of 3.35, 4.3 of 4.8, 0.93 of 1.008. From the L2 we assume
4.4 TB/s on an A100 and 5.6 TB/s on an H100 or H200; nothing is assumed for an RTX 4090.
"""

from dataclasses import dataclass

HMMA_FLOP = 2 * 16 * 8 * 16  # of HMMA.16816
IMMA_OP = 2 * 16 * 8 * 32  # of IMMA.16832

# Of the four instructions that a multiprocessor issues a clock, the share that kernels of mixed instructions reach.
ISSUE_SLOTS = 4
USABLE_ISSUE = 0.65
SHARED_BYTES_PER_CLOCK = 128


@dataclass(frozen=True)
class Gpu:
    """A GPU: the number of its multiprocessors, and the resources of one."""

    name: str
    arch: str  # of the machine code that it runs
    multiprocessors: int
    ghz: float
    copy_tb_s: float
    l2_tb_s: float | None
    rates: dict[str, float]  # warp instructions a clock
    hmma: float  # HMMA.16816 with fp32 sums a clock, at the tensor cores' peak
    imma: float  # IMMA.16832 a clock, likewise
    mma_share: float = 1.0  # of the peak that mma.sync reaches
    warps: int = 64
    blocks: int = 32
    shared_kb: int = 164  # of a multiprocessor
    registers: int = 65536

    def peak_tflops(self, pipe: str) -> float:
        per_clock = self.imma * IMMA_OP if pipe == "imma" else self.hmma * HMMA_FLOP
        return per_clock * self.multiprocessors * self.ghz / 1e3

    @property
    def copy_bytes_per_clock(self) -> float:
        """A multiprocessor's part of the copy's bandwidth."""
        return self.copy_tb_s * 1e3 / self.ghz / self.multiprocessors

    @property
    def l2_bytes_per_clock(self) -> float | None:
        return None if self.l2_tb_s is None else self.l2_tb_s * 1e3 / self.ghz / self.multiprocessors

    def resident_warps(self, threads: int, registers: int, shared_bytes: int) -> int:
        """Return the warps that a multiprocessor holds. Warps get registers by 256; 1 KB of a block is the system's."""
        warps = (threads + 31) // 32
        warp_registers = (max(registers, 1) * 32 + 255) // 256 * 256
        blocks = min(
            self.blocks,
            self.warps // warps,
            self.registers // (warp_registers * warps),
            self.shared_kb * 1024 // (shared_bytes + 1024),
        )
        return max(blocks, 1) * warps


AMPERE = {"alu": 2, "imad": 2, "fp32": 2, "bf16": 2, "half": 4, "mufu": 0.5}
HOPPER = {"alu": 2, "imad": 2, "fp32": 4, "bf16": 4, "half": 4, "mufu": 0.5}
ADA = {"alu": 2, "imad": 2, "fp32": 4, "bf16": 2, "half": 2, "mufu": 0.5}

# mma.sync on Hopper: 62.9 % of the peak on average (Luo et al., https://arxiv.org/abs/2402.13499); wgmma: 96 %
# (Luo et al., https://arxiv.org/abs/2501.12084).
HOPPER_MMA, HOPPER_WGMMA = 0.63, 0.96
# A GeForce does half as many products with fp32 sums as with fp16 ones; it does not halve integer ones.
GPUS = [
    Gpu("A100", "80", 108, 1.41, 1.5, 4.4, AMPERE, hmma=0.5, imma=0.5),
    Gpu("RTX 4090", "80", 128, 2.52, 0.93, None, ADA, hmma=0.125, imma=0.25, warps=48, blocks=24, shared_kb=100),
    Gpu("H100", "90a", 132, 1.755, 3.0, 5.6, HOPPER, hmma=1, imma=1, mma_share=HOPPER_MMA, shared_kb=228),
    Gpu("H200", "90a", 132, 1.755, 4.3, 5.6, HOPPER, hmma=1, imma=1, mma_share=HOPPER_MMA, shared_kb=228),
]
