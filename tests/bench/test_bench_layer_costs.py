"""The benchmark of layers' costs, on a small model of several kinds of layers."""

from pathlib import Path

import bench_layer_costs
import pytest
import torch
from support.tiny_folder import write_tiny_folder

from fastinfer.models import load_weights, open_checkpoint
from fastinfer.models.decoder import Decoder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("model"), "qwen3.5-moe")


def test_each_kind_of_layer_has_a_time(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--sequences", "2", "--context", "40", "--chunk-tokens", "8", "--rounds", "1"]
    bench_layer_costs.main(["--model", str(folder), *sizes])
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split("  ")[-4:] == ["states, experts", "attention, experts", "output layer", "stages"]
    assert [line.split("  ")[0] for line in lines] == ["weights, M", "decode 2, us", "chunk 8, us"]
    for line in lines:
        assert sum(map(int, line.split()[-1].split(","))) == 5


def test_costs_decide_about_the_stages(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_layer_costs, "measure", lambda *args: [1.0] * 5 + [9.0])
    bench_layer_costs.main(["--model", str(folder), "--context", "8"])
    _, _, decode, chunk = capsys.readouterr().out.splitlines()
    assert decode.split()[-5:] == ["us", "1.0", "1.0", "9.0", "4,1"]
    assert chunk.split()[-1] == "3,2"


def test_batches_continue_their_contexts(folder: Path) -> None:
    model = load_weights(open_checkpoint(folder, exact=True), "float32", "cpu", None)
    assert isinstance(model, Decoder)
    decode = bench_layer_costs.random_batch(model.config, 3, 40, 1)
    assert decode.positions.tolist() == [40, 40, 40]
    assert decode.logits_indices.tolist() == [0, 1, 2]
    chunk = bench_layer_costs.random_batch(model.config, 1, 40, 8)
    assert chunk.positions.tolist() == list(range(40, 48))
    assert chunk.slot_mappings[0].tolist() == list(range(40, 48))
    assert chunk.logits_indices.tolist() == [7]
    assert chunk.seq_lens.tolist() == [48]
    assert len(chunk.block_tables[0][0]) == 2
    assert torch.equal(chunk.row_start, torch.arange(9, dtype=torch.int32))  # type: ignore[arg-type]
