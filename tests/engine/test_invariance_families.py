"""Not a bit of a text or of its log-probabilities depends on how a request is computed: small random models of every
kind of layer and weight, on the CPU."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import mixed_decoder
from support.random_checkpoint import RandomCheckpoint, int4, int8
from support.toy import VOCAB_SIZE, ToyTokenizer, always_speculate, check_blocks, drain
from torch import Tensor

from fastinfer.engine.config import EngineConfig
from fastinfer.engine.engine import Engine
from fastinfer.formats.unpacked import Dense, Int8, Unpacked
from fastinfer.models.config import ModelConfig, Precision
from fastinfer.models.decoder import Decoder
from fastinfer.models.loader import load_decoder
from fastinfer.sampling_params import BeamSearchParams, SamplingParams

PROMPTS = [[(5 * i + 3 * j) % VOCAB_SIZE for j in range(length)] for i, length in enumerate((1, 6, 70, 13, 36, 17))]
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3)
LIMITS: dict[str, Any] = {"block_size": 8, "num_kv_blocks": 128, "max_num_seqs": 8, "max_num_batched_tokens": 96}

GEMMA = {
    "windows": (8, 0, 8),
    "attention_softcap": 5.0,
    "logits_softcap": 3.0,
    "post_norms": True,
    "qk_norm": True,
    "embedding_scale": 3.0,
    "activation": "gelu_tanh",
}
MIXTURE = {"num_experts": 8, "experts_per_token": 3}


def w8a8(name: str, values: Tensor) -> Unpacked:
    """A scale per row in layers."""
    if not name.startswith("layers."):
        return int8(values)
    scales = values.abs().amax(1, keepdim=True) / 127
    return Int8((values / scales).round().to(torch.int8), scales, int8_activations=True)


Form = Callable[[str, Tensor], Unpacked]
MODELS: dict[str, tuple[dict[str, Any], Form, str]] = {
    "int4": ({}, lambda _, values: int4(values), "auto"),
    "int4, bf16": ({}, lambda _, values: int4(values), "bfloat16"),
    "w8a8": ({}, w8a8, "auto"),
    "gemma, bf16 weights": (GEMMA, lambda _, values: Dense(values.bfloat16()), "auto"),
    "gemma, int8": (GEMMA, lambda _, values: int8(values), "auto"),
    "mixture, fp32": (MIXTURE, lambda _, values: Dense(values), "auto"),
    "mixture, int4": (MIXTURE, lambda name, v: Dense(v) if name.endswith("router") else int4(v), "auto"),
    "gpt2": ({"rotary_dim": 0, "gated": False, "norm": "layer_norm", "mlp_bias": True}, lambda _, v: Dense(v), "auto"),
}


@pytest.fixture(scope="module", params=MODELS)
def decoder(request: pytest.FixtureRequest) -> Decoder:
    changes, form, dtype = MODELS[request.param]
    config: ModelConfig = replace(mixed_decoder.CONFIG, **changes)
    return load_decoder(RandomCheckpoint(config, form), Precision.of(dtype), None)


def engine_of(decoder: Decoder, **limits: Any) -> Engine:
    config = EngineConfig(**{**LIMITS, "deterministic": True, **limits})
    draft = {"draft_model": decoder} if limits.get("num_speculative_tokens") == 3 else {}
    engine = Engine(decoder, ToyTokenizer(), config, **draft)  # type: ignore[arg-type]
    for tensor in (tensor for cache in engine.worker.kv_cache for tensor in cache.tensors):
        tensor.view(torch.uint8).fill_(0xFF)  # NaN
    return engine


def answers(engine: Engine, params: SamplingParams = PARAMS) -> list[Any]:
    """Tokens with all log-probabilities, of every prompt's completions, which must be the same."""
    ids = [engine.add_request(prompt, params) for prompt in PROMPTS]
    outputs = drain(engine)
    check_blocks(engine)
    found = [[(c.token_ids, c.logprobs) for c in outputs[i].outputs] for i in ids]
    assert all(each == completions[0] for completions in found for each in completions)
    return [completions[0] for completions in found]


def twice(engine: Engine) -> list[Any]:
    answers(engine)
    found = answers(engine)
    assert engine.stats().num_hit_tokens > 100
    return found


def preempted(engine: Engine) -> list[Any]:
    found = answers(engine)
    assert engine.stats().num_preemptions > 0
    return found


def with_drafts(engine: Engine) -> list[Any]:
    found = answers(always_speculate(engine))
    assert engine.stats().num_drafted_tokens > 0
    return found


WAYS: dict[str, Callable[[Decoder], list[Any]]] = {
    "batched": lambda decoder: answers(engine_of(decoder)),
    "chunked": lambda decoder: answers(engine_of(decoder, max_num_batched_tokens=19)),
    "prefix hits": lambda decoder: twice(engine_of(decoder)),
    "preempted": lambda decoder: preempted(engine_of(decoder, num_kv_blocks=13, max_model_len=88)),
    "n-grams": lambda decoder: with_drafts(engine_of(decoder, num_speculative_tokens=5)),
    "a draft model": lambda decoder: with_drafts(engine_of(decoder, num_speculative_tokens=3)),
    "three copies": lambda decoder: answers(engine_of(decoder), replace(PARAMS, n=3)),
    "without graphs": lambda decoder: answers(engine_of(decoder, enforce_eager=True)),
}


def test_answers(decoder: Decoder) -> None:
    alone = {"max_num_seqs": 1, "enable_prefix_caching": False, "enforce_eager": True}
    expected = answers(engine_of(decoder, **alone))
    assert len({tuple(tokens) for tokens, _ in expected}) > 1
    for name, way in WAYS.items():
        assert way(decoder) == expected, name


def test_beams(decoder: Decoder) -> None:
    """Of one request alone, and of all at once."""

    def beams(engine: Engine, prompts: list[list[int]]) -> list[Any]:
        params = BeamSearchParams(3, max_tokens=8, ignore_eos=True)
        ids = [engine.add_beam_request(prompt, params) for prompt in prompts]
        outputs = drain(engine)
        return [[(c.token_ids, c.cumulative_logprob) for c in outputs[i].outputs] for i in ids]

    engine = engine_of(decoder, enable_prefix_caching=False, max_num_seqs=24)
    expected = [beams(engine, [prompt])[0] for prompt in PROMPTS]
    assert beams(engine_of(decoder, max_num_seqs=24, max_num_batched_tokens=40), PROMPTS) == expected
