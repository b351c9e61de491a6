"""docs/performance.md shows bench/results/h100; ``python docs/update_h100.py`` updates it."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.scripts import load_script

measurements = load_script("docs/measurements.py")
UPDATE_H100 = load_script("docs/update_h100.py")
MIB = 1 << 20


def timing(name: str, microseconds: list[float], bytes_moved: int | None = None) -> dict[str, Any]:
    samples = [us / 1e6 for us in microseconds]
    return {"name": name, "samples_s": samples, "bytes_moved": bytes_moved, "flops": 4_000_000, "error": None}


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A benchmark in which the copy has 1 TB/s, so that 16 MiB take 16.8 us."""
    cases = {
        "M=1 small": [timing("fastinfer", [1, 9, 2], MIB)],
        "M=1 N=8": [
            timing("fastinfer", [50, 33.554432, 20], 16 * MIB),
            timing("torch", [10, 11, 12]),
            timing("SDPA", []),
        ],
        "M=1 N=9": [
            timing("fastinfer", [16.777216], 16 * MIB),
            timing("torch, slow", [90]),
            timing("torch", [33.554432]),
        ],
        "M=16 N=8": [timing("fastinfer", [1], 16 * MIB)],
    }
    measured = {"ceilings": {"copy_gb_per_s": 1000.0, "matmul_gflop_per_s": 1.0}, "cases": cases}
    (tmp_path / "gemm.json").write_text(json.dumps(measured))
    monkeypatch.setattr(measurements, "RESULTS", tmp_path)


def test_tables_are_up_to_date() -> None:
    page = UPDATE_H100.PAGE.read_text()
    shown = {block["name"]: block[0].split(" -->\n", 1)[1] for block in UPDATE_H100.BLOCK.finditer(page)}
    assert shown == {name: UPDATE_H100.table(name) for name in UPDATE_H100.TABLES}


def test_files_name_no_machine() -> None:
    paths = list(measurements.RESULTS.glob("*.json"))
    assert paths
    for path in paths:
        text = path.read_text()
        assert "NVIDIA H100" in text
        assert '"/' not in text, path


def test_shares_are_medians_of_large_cases(results: None) -> None:
    measured = measurements.Measured("gemm", "fastinfer", "M=1 ")
    assert measured.shares() == "0.50 to 1.00"
    assert measurements.Measured("gemm", "fastinfer", "M=1 N=9").rates() == "0 TFLOP/s"


def test_the_fastest_peer_counts(results: None) -> None:
    small, slower, faster, alone = measurements.read_cases("gemm")
    assert slower.times_the_peer("fastinfer") == pytest.approx(11 / 33.554432)
    assert faster.times_the_peer("fastinfer") == pytest.approx(2)
    assert small.times_the_peer("fastinfer") is alone.times_the_peer("fastinfer") is None


def test_a_benchmark_that_has_changed(results: None) -> None:
    with pytest.raises(SystemExit, match=r"gemm.json has no case M=2 "):
        measurements.read_cases("gemm", "M=2 ")
