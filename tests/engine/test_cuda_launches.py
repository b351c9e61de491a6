"""The kernels that a decode step launches on a GPU, counted on the emulator."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.helpers import device_fixture
from support.launches import count_launches
from support.mixed_decoder import CONFIG
from support.placement import host_operators
from support.random_checkpoint import RandomCheckpoint, int4, int8
from support.toy import ToyTokenizer

from fastinfer.engine.config import EngineConfig
from fastinfer.engine.engine import Engine
from fastinfer.formats.unpacked import Dense
from fastinfer.models.config import ModelConfig, Precision
from fastinfer.models.loader import load_decoder
from fastinfer.sampling_params import SamplingParams

pytestmark = pytest.mark.unsanitized
device = device_fixture("emulated")

# So deep that products are cut and their pieces are added up.
DEEP = replace(CONFIG, hidden_size=512, intermediate_size=768, num_layers=2, qk_norm="head")
FORMS = {
    "dense": ("gemm", lambda values: Dense(values.bfloat16())),
    "int4": ("int4_gemm", int4),
    "int8": ("int8_gemm", int8),
}
ATTENTION = ["norm_rotary_store", "paged_attention"]


def decode_step(config: ModelConfig, form: str, seqs: int, library: Path) -> list[str]:
    """The launches of a step in which every sequence decodes."""
    with host_operators():  # the engine's tensors are those of a CPU
        return _decode_step(config, form, seqs, library)


def _decode_step(config: ModelConfig, form: str, seqs: int, library: Path) -> list[str]:
    checkpoint = RandomCheckpoint(config, lambda name, values: FORMS[form][1](values))
    model = load_decoder(checkpoint, Precision(torch.bfloat16, 32, 32, torch.bfloat16), None, "cpu")
    settings = EngineConfig(
        block_size=8, num_kv_blocks=64, max_num_seqs=16, max_num_batched_tokens=64, enforce_eager=True
    )
    engine = Engine(model, ToyTokenizer(), settings)  # type: ignore[arg-type]
    for seed in range(seqs):
        engine.add_request(
            [1, 2, seed], SamplingParams(temperature=0.8, top_k=9, seed=seed, max_tokens=4, ignore_eos=True)
        )
    engine.step()
    return count_launches(library, engine.step)


@pytest.mark.parametrize("seqs", [1, 16])
@pytest.mark.parametrize("form", FORMS)
def test_a_dense_layer_is_eight_launches(
    form: str, seqs: int, device: str, emulated_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Activation and residuals are parts of the products, whose counters need no kernel to clear them."""
    # On a CPU, as which the emulator counts here, bf16 products have their norm computed before.
    monkeypatch.setattr("fastinfer.weights.weight.apply_norm", lambda x, options: x)
    product = FORMS[form][0]
    layer = ["rms_norm", product, *ATTENTION, product, "rms_norm", product, product]
    launches = decode_step(DEEP, form, seqs, emulated_library)
    start = launches.index("paged_attention_plan") + 1
    assert launches[start:] == [*layer * DEEP.num_layers, "embedding", "rms_norm", product, "sample"]
    assert len(launches[:start]) == 2, "the embedding, and the plan of attention"


def test_a_layer_of_experts_is_eleven_launches(device: str, emulated_library: Path) -> None:
    """Six of them are the experts': norm, router, routing, two products and the weighted sum."""
    config = replace(DEEP, num_experts=6, experts_per_token=2)
    experts = ["rms_norm", "int4_gemm", "route_experts", "int4_gemm", "int4_gemm", "combine_experts"]
    layer = ["rms_norm", "int4_gemm", *ATTENTION, "int4_gemm", *experts]
    launches = decode_step(config, "int4", 3, emulated_library)
    start = launches.index("paged_attention_plan") + 1
    assert launches[start:] == [*layer * config.num_layers, "embedding", "rms_norm", "int4_gemm", "sample"]
