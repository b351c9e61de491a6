"""Every family of decoders against transformers, in fp32, on small random checkpoints; also with shared weights."""

from pathlib import Path

import pytest
import torch
from support.families import FAMILIES, expected, load, save_model, some_tokens
from support.helpers import assert_bitwise
from support.teacher_forcing import log_probabilities

from fastinfer.models.shared_model import read_model, write_model
from fastinfer.utils.sealed_memory import SealedMemory

# One family for each place of a norm, and the name of its eps.
EPSILONS = {
    "cohere2": "layer_norm_eps",
    "gpt2": "layer_norm_epsilon",
    "nemotron-h": "layer_norm_epsilon",
    "lfm2": "norm_eps",
    "nemotron": "norm_eps",
    **dict.fromkeys(("phi", "gpt-neox", "cohere2-moe"), "layer_norm_eps"),
    **dict.fromkeys(("hunyuan", "nanochat", "vaultgemma", "cohere2-moe-rms"), "rms_norm_eps"),
    **dict.fromkeys(("qwen3", "gemma2", "gemma3", "gemma4-moe", "gemma4-inputs", "olmo2", "exaone4"), "rms_norm_eps"),
    **dict.fromkeys(("minimax-m2", "deepseek-v3", "glm-dsa", "granite-moe-shared", "granite-hybrid"), "rms_norm_eps"),
    **dict.fromkeys(("falcon-h1-norm", "qwen3.5-moe", "afmoe", "flex-olmo"), "rms_norm_eps"),
    **dict.fromkeys(("olmo-hybrid", "llama4", "step3.7", "laguna", "kolibri"), "rms_norm_eps"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities(family: str, tmp_path: Path) -> None:
    reference = expected(save_model(tmp_path, family), some_tokens())
    model = load(tmp_path)
    got = log_probabilities(model, some_tokens(), "float32")
    assert (got - reference).abs().max() < 1e-3 * max(1.0, float(reference.std()))
    assert (got.argmax(-1) == reference.argmax(-1)).float().mean() >= 0.99
    assert len(set(got.argmax(-1).tolist())) > 5  # else everything would agree
    memory = SealedMemory.create()
    write_model(model, "", memory)
    shared, _ = read_model(memory)  # whose memory ends a process that writes to it
    assert_bitwise(log_probabilities(shared, some_tokens(), "float32"), got)


@pytest.mark.parametrize("family", EPSILONS)
def test_a_large_epsilon(family: str, tmp_path: Path) -> None:
    """A usual one changes too little to be seen."""
    reference = expected(save_model(tmp_path, family, {EPSILONS[family]: 0.25}), some_tokens())
    assert (log_probabilities(load(tmp_path), some_tokens(), "float32") - reference).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("dtype", "limit"),
    [(torch.float16, 3e-3), (torch.bfloat16, 0.02), (torch.int8, 0.05), (torch.float8_e4m3fn, 0.2), (torch.uint8, 0.4)],
)
def test_other_caches_are_close(dtype: torch.dtype, limit: float, tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3")
    model = load(tmp_path)
    exact, got = (log_probabilities(model, some_tokens(), "float32", None, kind) for kind in (torch.float32, dtype))
    assert 0 < (got - exact).abs().mean() < limit
