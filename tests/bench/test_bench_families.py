"""The comparison by kinds of layers: the models that it writes, and its ratios."""

from pathlib import Path

import pytest
from bench_families import WORKLOADS, report, summary
from families import gguf_path, write_model
from support.families import load, some_tokens
from support.teacher_forcing import log_probabilities

from fastinfer.formats.gguf import GGUFFile
from fastinfer.models.config import Precision
from fastinfer.models.gguf_checkpoint import GGUFCheckpoint
from fastinfer.models.loader import load_decoder

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "initializer_range": 0.06,
}
SMALL = {
    "gpt-oss": SIZES | {"head_dim": 32, "num_hidden_layers": 2},
    "short-convolution": SIZES | {"block_multiple_of": 32},
}


@pytest.mark.parametrize("kind", SMALL)
def test_the_folder_and_the_gguf_file_have_the_same_weights(kind: str, tmp_path: Path) -> None:
    write_model(tmp_path / "model", kind, SMALL[kind])
    checkpoint = GGUFCheckpoint(GGUFFile(gguf_path(tmp_path / "model")), exact=True)
    from_file = log_probabilities(load_decoder(checkpoint, Precision.of("float32"), None), some_tokens(), "float32")
    from_folder = log_probabilities(load(tmp_path / "model"), some_tokens(), "float32")
    assert (from_file - from_folder).abs().max() < 1e-3


def test_a_kind_that_gguf_does_not_have(tmp_path: Path) -> None:
    write_model(tmp_path / "model", "long-short-convolution", SIZES | {"head_dim": 32, "num_hidden_layers": 3})
    assert not gguf_path(tmp_path / "model").exists()
    assert load(tmp_path / "model").config.states is not None


def test_ratios_are_those_of_each_round() -> None:
    """The machine gets slower by ten, and both with it."""

    def answers(seconds: list[float]) -> dict[str, list[dict[str, float]]]:
        return {key: [{"first_token_s": s, "total_s": 2 * s} for s in seconds] for key in WORKLOADS}

    engines = summary({"fastinfer": answers([1, 10, 10]), "llama_cpp": answers([3, 30, 15])})
    assert engines["llama_cpp"]["fastinfer_is_times"] == {key: [1.5, 3.0, 3.0] for key in WORKLOADS}
    assert report({"mamba2": engines}).count("3.00 (1.50 to 3.00)") == 2
