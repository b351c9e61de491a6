"""Models with places on a GPU and on the CPU, against the same model on the GPU alone.

``make gpu-check`` runs this, and its rehearsal on a fake GPU, where operands on two devices are errors, too.
"""

from dataclasses import replace
from typing import Any

import pytest
from support import mixed_decoder
from support.helpers import device_fixture
from support.random_checkpoint import RandomCheckpoint, int4
from support.toy import ToyTokenizer, drain

from fastinfer.engine.config import EngineConfig
from fastinfer.engine.engine import Engine
from fastinfer.models.config import ModelConfig
from fastinfer.models.layer_places import place_layers
from fastinfer.models.placed_decoder import load_placed
from fastinfer.sampling_params import SamplingParams
from fastinfer.utils.device import resolve_places

device = device_fixture("cuda")

CONFIG = replace(mixed_decoder.CONFIG, num_layers=4)
EXPERTS = replace(CONFIG, num_experts=4, experts_per_token=2)
PARAMS = SamplingParams(max_tokens=3, temperature=0.0, logprobs=5, ignore_eos=True)


def generate(sizes: ModelConfig, places: str) -> dict[str, Any]:
    """Outputs of a random model in INT4 whose layers are in these places."""
    listed = resolve_places(places)
    layers = place_layers(sizes, listed, [place.share or 1.0 for place in listed])
    checkpoint = RandomCheckpoint(sizes, lambda _, values: int4(values))
    limits: dict[str, Any] = {"block_size": 8, "num_kv_blocks": 64, "max_num_seqs": 4, "max_num_batched_tokens": 24}
    config = EngineConfig(device=listed[0].device, places=listed, **limits)
    model = load_placed(layers, checkpoint, "bfloat16", config.device, None)
    engine = Engine(model, ToyTokenizer(), config)  # type: ignore[arg-type]
    for name, prompt in {"short": [7, 8, 9], "long": [*range(3, 33)]}.items():
        engine.add_request(prompt, PARAMS, request_id=name)
    return {name: output.outputs[0] for name, output in drain(engine).items()}


@pytest.mark.parametrize(
    ("sizes", "places"),
    [
        (CONFIG, "cuda:0=3,cuda:0=1"),
        (CONFIG, "cuda:0=3,cpu=1"),
        (EXPERTS, "cuda:0+cpu=2,cuda:0=2"),
        (CONFIG, "cpu=1,cuda:0=3"),
    ],
    ids=["gpu-gpu", "gpu-cpu", "experts", "cpu-gpu"],
)
def test_texts_are_those_of_the_gpu_alone(device: str, sizes: ModelConfig, places: str) -> None:
    """Two places on a GPU give the same bits. A CPU rounds in other places, and the inputs of its products to 8 bits.

    Here that made a difference of 0.4 at most.
    """
    found, expected = generate(sizes, places), generate(sizes, "cuda:0")
    for name, ours in found.items():
        pairs = zip(ours.logprobs, expected[name].logprobs, strict=True)
        if "cpu" not in places:
            assert ours.logprobs == expected[name].logprobs
        for own, other in list(pairs)[:1]:  # of the same prompt; the drawn tokens may differ
            common = own.keys() & other.keys()
            assert len(common) >= 3
            assert all(abs(own[token].logprob - other[token].logprob) < 0.6 for token in common)
