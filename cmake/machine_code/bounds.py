"""The upper bound of a kernel's speed on a GPU, and what binds it."""

from dataclasses import dataclass

from machine_code.cost import Cost
from machine_code.gpus import HMMA_FLOP, HOPPER_WGMMA, IMMA_OP, ISSUE_SLOTS, SHARED_BYTES_PER_CLOCK, USABLE_ISSUE, Gpu
from machine_code.rounds import Round

MEMORY = "memory"


@dataclass(frozen=True)
class Bound:
    """A share of the copy's bandwidth, above 1 if memory binds; or, with ``tflops``, of the tensor peak."""

    share: float
    binds: str
    tflops: float | None = None


def clocks_of(cost: Cost, work: Round, gpu: Gpu, registers: int, static_shared: int = 0) -> dict[str, float]:
    """Return a multiprocessor's clocks for one warp's round, by the resource that would take them alone."""
    pipes, rates = cost.pipes, gpu.rates
    clocks = {pipe: pipes.get(pipe, 0) / rates[pipe] for pipe in ("alu", "imad", "mufu", "half")}
    # The products of integers and of bf16 run where those of fp32 do.
    clocks["fp32"] = (pipes.get("fp32", 0) + pipes.get("imad", 0)) / rates["fp32"] + pipes.get("bf16", 0) / rates[
        "bf16"
    ]
    clocks["tensor"] = (pipes.get("hmma", 0) / gpu.hmma + pipes.get("imma", 0) / gpu.imma) / gpu.mma_share
    if "hgmma" in pipes:
        clocks["tensor"] = work.flop / HMMA_FLOP / gpu.hmma / HOPPER_WGMMA
    if "igmma" in pipes:
        clocks["tensor"] = work.flop / IMMA_OP / gpu.imma / HOPPER_WGMMA
    clocks["issue"] = cost.instructions / ISSUE_SLOTS / USABLE_ISSUE
    shuffles = SHARED_BYTES_PER_CLOCK * pipes.get("shuffle", 0)
    clocks["shared memory"] = (cost.shared_bytes + shuffles) / SHARED_BYTES_PER_CLOCK
    clocks["latency"] = cost.latency / gpu.resident_warps(work.threads, registers, work.shared + static_shared)
    if gpu.l2_bytes_per_clock is not None:
        clocks["L2"] = work.l2_bytes / gpu.l2_bytes_per_clock
    return clocks


def bound_of(cost: Cost, work: Round, gpu: Gpu, registers: int, static_shared: int = 0) -> Bound:
    clocks = clocks_of(cost, work, gpu, registers, static_shared)
    binds = max(clocks, key=clocks.__getitem__)
    if work.bound_by_tensor_cores:
        tflops = work.flop / clocks[binds] * gpu.multiprocessors * gpu.ghz / 1e3
        peak = gpu.peak_tflops("hmma" if cost.pipes.keys().isdisjoint(("imma", "igmma")) else "imma")
        return Bound(tflops / peak, binds, tflops)
    share = work.bytes / gpu.copy_bytes_per_clock / clocks[binds]
    return Bound(share, binds if share < 1 else MEMORY)
