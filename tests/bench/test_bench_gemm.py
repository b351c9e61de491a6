"""The bytes that the benchmark of dense products counts."""

from typing import Any

import bench_gemm
import pytest
from harness import Setting


def test_a_gated_activation_writes_half_of_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []

    def compare(candidates: Any, inputs: Any, *, bytes_moved: int, **options: Any) -> list[Any]:
        counted.append(bytes_moved)
        return []

    monkeypatch.setattr(bench_gemm, "compare", compare)
    monkeypatch.setattr(bench_gemm, "cold_inputs", lambda make: [make()])
    bench_gemm.run(Setting("cpu", repeats=1, rehearsal=True))
    # Of each shape 2 rows of 64 inputs and 64 outputs in bf16; of the second one also with the activation.
    plain, gated = 2 * (64 * 64 + 2 * 64 + 2 * 64), 2 * (64 * 64 + 2 * 64 + 2 * 32)
    assert set(counted) == {plain, gated}
    assert counted.count(gated) == len(bench_gemm.TOKENS)
