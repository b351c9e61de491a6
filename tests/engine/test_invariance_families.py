"""Not a bit of a text or of its log-probabilities depends on how a request is computed: small random models of every
kind of layer and weight, on the CPU."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import mixed_decoder
from support.random_checkpoint import RandomCheckpoint, int4, int8
from support.toy import ToyTokenizer, drain
from support.ways import PARAMS, PROMPTS, answers, preempted, twice, with_drafts
from torch import Tensor

from fastinfer.engine.config import EngineConfig
from fastinfer.engine.engine import Engine
from fastinfer.formats.unpacked import Dense, Int8, Unpacked
from fastinfer.models.config import IndexerConfig, KVShape, LatentAttentionConfig, ModelConfig, Precision, RouterConfig
from fastinfer.models.decoder import Decoder
from fastinfer.models.loader import load_decoder
from fastinfer.models.state_config import LinearAttentionConfig, Mamba2Config, ShortConvConfig
from fastinfer.sampling_params import BeamSearchParams

LIMITS: dict[str, Any] = {"block_size": 8, "num_kv_blocks": 128, "max_num_seqs": 8, "max_num_batched_tokens": 96}

GEMMA = {
    "windows": (8, 0, 8),
    "attention_softcap": 5.0,
    "logits_softcap": 3.0,
    "post_norms": True,
    "qk_norm": "head",
    "embedding_scale": 3.0,
    "activation": "gelu_tanh",
}
OLMO = {"qk_norm": "all", "pre_norms": False, "post_norms": True, "windows": (8, 0, 8), "unrotated_layers": {1}}
COHERE = {
    "norm": "layer_norm",
    "norm_bias": False,
    "parallel": True,
    "interleaved_rope": True,
    "logits_scale": 0.25,
    "unrotated_layers": {2},
    "query_growth": 0.5,
    "query_length": 20,
}
LINEAR = {
    "state_layers": (True, False, True),
    "states": LinearAttentionConfig(2, 4, 16, 32, 4),
    "output_gate": True,
    "qk_norm": "head",
    "rotary_dim": 16,
}
LATENT = {
    "num_kv_heads": 1,
    "head_dim": 80,
    "rotary_dim": 16,
    "attention_scale": 0.15,
    "latent_attention": LatentAttentionConfig(96, 64, 32, 16, 48),
    "query_growth": 0.5,
    "query_length": 20,
    "interleaved_rope": True,
}
# A delta rule with decays of channels, and latent attention without rotations.
KIMI = LATENT | {
    "state_layers": (True, False, True),
    "states": LinearAttentionConfig(
        4, 4, 48, 32, 3, separate_projections=True, channel_decay=True, decay_rank=32, gate_rank=64, sigmoid_gate=True
    ),
    "unrotated_layers": {0, 1, 2},
}
# Decays with a bound, and latent attention with gates of heads.
BAILING = LATENT | {
    "state_layers": (True, False, True),
    "states": LinearAttentionConfig(
        4, 4, 48, 32, 4, separate_projections=True, channel_decay=True, sigmoid_gate=True, decay_bound=-5.0
    ),
    "output_gate": True,
    "separate_gate": True,
    "head_gate": True,
}
# The second layer chooses the tokens of the third, too. Some sequences are shorter than what is read.
INDEXER = LATENT | {"indexer": IndexerConfig(5, 32, 10, interleaved_rope=False, layers=(0, 1, 1))}
# Layers of different heads, the last two with the keys and values of the first two.
SHAPES = {
    "num_layers": 4,
    "windows": (8, 0, 8, 0),
    "kv_shapes": (KVShape(2, 64), KVShape(1, 128), KVShape(2, 64), KVShape(1, 128)),
    "kv_layers": (0, 1, 0, 1),
    "qk_norm": "head",
}
SHORT_CONV = {
    "state_layers": (True, False, True),
    "states": ShortConvConfig(mixed_decoder.CONFIG.hidden_size, 3, has_bias=True),
    "qk_norm": "head",
}
GEMMA4 = SHAPES | {
    "post_norms": True,
    "v_norm": True,
    "layer_scales": True,
    "per_layer_size": 32,
    "attention_scale": 0.2,
    "embedding_scale": 3.0,
    "activation": "gelu_tanh",
    "rotary_dim": 128,
    "local_rotary_dim": 64,
    "local_rope_theta": 1e3,
    "dense_layers": {2, 3},
    "dense_intermediate_size": 192,
}
GEMMA4_MIXTURE = GEMMA4 | {
    "kv_layers": (),
    "tied_kv_layers": {1, 3},
    "per_layer_size": 0,
    "dense_layers": frozenset[int](),
    "mlp_beside_experts": True,
    "num_experts": 8,
    "experts_per_token": 3,
}
MAMBA2 = {
    "state_layers": (True, False, True),
    "states": Mamba2Config(4, 32, 48, 2, 4, projection_bias=True),
    "unrotated_layers": {1},
}
# A layer without an MLP, an MLP without a gate, and experts without gates.
NEMOTRON = MAMBA2 | {
    "stored_layers": ((0, 1), (2, None), (3, 4)),
    "gated": False,
    "activation": "relu2",
    "num_experts": 8,
    "experts_per_token": 3,
    "shared_intermediate_size": 64,
    "dense_layers": frozenset({0, 1}),
    "dense_intermediate_size": 96,
}
# Experts of projected hidden states.
NEMOTRON_LATENT = NEMOTRON | {"expert_latent_size": 96}
# Windows that are chunks of the text, and queries that grow in the layer between them.
CHUNKS = {
    "windows": (8, 0, 8),
    "chunked_windows": True,
    "unrotated_layers": {1},
    "query_growth": 0.5,
    "query_length": 7,
    "query_offset": 1,
    "growing_layers": {1},
}
# Query heads, limits and windows that differ by layer, in the MLP of the first one, too.
STEP = {
    **{"num_experts": 8, "experts_per_token": 3},
    "windows": (8, 0, 8),
    "num_heads": 6,
    "layer_heads": (2, 6, 4),
    "qk_norm": "head",
    "output_gate": True,
    "separate_gate": True,
    "head_gate": True,
    "dense_layers": frozenset({0}),
    "dense_intermediate_size": 96,
    "shared_intermediate_size": 64,
    "router": RouterConfig("sigmoid", has_bias=True, scale=1.5),
    "swiglu_limits": (0.3, 0.2, 0.0),
    "shared_swiglu_limits": (0.0, 0.0, 0.1),
}
LAGUNA = {
    **{key: value for key, value in STEP.items() if not key.endswith("limits")},
    "softplus_gate": True,
    "router": RouterConfig("sigmoid", has_bias=True, softcap=0.5),
}
KOLIBRI = {
    **{"num_experts": 8, "experts_per_token": 3, "post_norms": True, "windows": (8, 0, 8), "unrotated_layers": {1}},
    "router": RouterConfig("sigmoid", has_bias=True, renormalize=False, biased_logits=True),
}
XIELU = {"gated": False, "activation": "xielu"}
# Mamba-2 and attention with the same input, with factors.
FALCON = {
    "num_layers": 4,
    "stored_layers": ((0, None), (0, 0), (1, None), (1, 1)),
    "state_layers": (True, False, True, False),
    "states": Mamba2Config(
        4, 32, 48, 2, 4, has_norm=False, input_scale=1.2, conv_scales=(0.7, 1.3, 0.6), dt_scale=0.8, output_scale=0.4
    ),
    "embedding_scale": 5.0,
    "attention_input_scale": 1.3,
    "mlp_input_scale": 0.8,
    "residual_scale": 0.6,
}
MIXTURE = {"num_experts": 8, "experts_per_token": 3}
GRANITE = {
    **MIXTURE,
    "shared_intermediate_size": 64,
    "embedding_scale": 12.0,
    "residual_scale": 0.22,
    "attention_scale": 0.1,
    "logits_scale": 0.125,
}
MUSE = {
    "windows": (8, 0, 8),
    "unrotated_layers": {1},
    "post_norms": True,
    "post_norm_eps": 1e-8,
    "qk_norm": "unit",
    "query_scale": 3.87,
    "output_gate": True,
    "separate_gate": True,
    "normed_embedding": True,
    "logits_softcap": 3.0,
}
LINEAR_MIXTURE = {
    **LINEAR,
    **MIXTURE,
    "states": LinearAttentionConfig(2, 4, 16, 32, 4, tiled_output=True),
    "shared_intermediate_size": 64,
    "shared_expert_gate": True,
}


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
    "olmo, int8": (OLMO, lambda _, values: int8(values), "auto"),
    "cohere, int4": (COHERE, lambda _, values: int4(values), "auto"),
    "shapes, int4": (SHAPES, lambda _, values: int4(values), "auto"),
    "shapes, bf16": (SHAPES, lambda _, values: Dense(values.bfloat16()), "bfloat16"),
    "gemma 4, int8": (GEMMA4, lambda _, values: int8(values), "auto"),
    "gemma 4, bf16": (GEMMA4, lambda _, values: Dense(values.bfloat16()), "bfloat16"),
    "gemma 4's mixture, int4": (
        GEMMA4_MIXTURE,
        lambda name, v: Dense(v) if name.endswith("router") else int4(v),
        "auto",
    ),
    "linear, int4": (LINEAR, lambda _, values: int4(values), "auto"),
    "linear, bf16": (LINEAR, lambda _, values: Dense(values.bfloat16()), "bfloat16"),
    "short convolutions, int4": (SHORT_CONV, lambda _, values: int4(values), "auto"),
    "short convolutions, bf16": (SHORT_CONV, lambda _, values: Dense(values.bfloat16()), "bfloat16"),
    "mamba 2, int4": (MAMBA2, lambda _, values: int4(values), "auto"),
    "nemotron, int4": (NEMOTRON, lambda name, v: Dense(v) if name.endswith("router") else int4(v), "auto"),
    "nemotron's latents, int4": (
        NEMOTRON_LATENT,
        lambda name, v: Dense(v) if name.endswith("router") else int4(v),
        "auto",
    ),
    "chunks, int4": (CHUNKS, lambda _, values: int4(values), "auto"),
    "chunks, bf16": (CHUNKS, lambda _, values: Dense(values.bfloat16()), "bfloat16"),
    "xielu, int4": (XIELU, lambda _, values: int4(values), "auto"),
    "mamba 2, bf16": (MAMBA2, lambda _, values: Dense(values.bfloat16()), "bfloat16"),
    "falcon, int4": (FALCON, lambda _, values: int4(values), "auto"),
    "falcon, bf16": (FALCON, lambda _, values: Dense(values.bfloat16()), "bfloat16"),
    "latent, int4": (LATENT, lambda _, values: int4(values), "auto"),
    "latent, bf16": (LATENT, lambda _, values: Dense(values.bfloat16()), "bfloat16"),
    "latent, w8a8": (LATENT, w8a8, "auto"),
    "indexer, int4": (INDEXER, lambda _, values: int4(values), "auto"),
    "indexer, bf16": (INDEXER, lambda _, values: Dense(values.bfloat16()), "bfloat16"),
    "mixture, fp32": (MIXTURE, lambda _, values: Dense(values), "auto"),
    "sparse mixer, fp32": (
        MIXTURE | {"router": RouterConfig("sparsemixer", renormalize=False, jitter=0.2)},
        lambda _, values: Dense(values),
        "auto",
    ),
    "mixture, int4": (MIXTURE, lambda name, v: Dense(v) if name.endswith("router") else int4(v), "auto"),
    "linear mixture, int4": (LINEAR_MIXTURE, lambda n, v: int4(v) if n.endswith("proj") else Dense(v), "auto"),
    "granite, int4": (GRANITE, lambda n, v: int4(v) if n.endswith("proj") else Dense(v), "auto"),
    "muse, bf16": (MUSE, lambda _, values: Dense(values.bfloat16()), "bfloat16"),
    "step, int4": (STEP, lambda name, v: Dense(v) if name.endswith("router") else int4(v), "auto"),
    "step, bf16": (STEP, lambda _, values: Dense(values.bfloat16()), "bfloat16"),
    "laguna, int4": (LAGUNA, lambda name, v: Dense(v) if name.endswith("router") else int4(v), "auto"),
    "laguna, bf16": (
        LAGUNA | {"head_gate": False},
        lambda _, values: Dense(values.bfloat16()),
        "bfloat16",
    ),
    "kolibri, int4": (KOLIBRI, lambda name, v: Dense(v) if name.endswith("router") else int4(v), "auto"),
    "gpt2": ({"rotary_dim": 0, "gated": False, "norm": "layer_norm", "mlp_bias": True}, lambda _, v: Dense(v), "auto"),
    "kimi, int4": (KIMI, lambda _, values: int4(values), "auto"),
    "kimi, bf16": (KIMI, lambda _, values: Dense(values.bfloat16()), "bfloat16"),
    "bailing, int4": (BAILING, lambda _, values: int4(values), "auto"),
}


@pytest.fixture(scope="module", params=MODELS)
def decoder(request: pytest.FixtureRequest) -> Decoder:
    changes, form, dtype = MODELS[request.param]
    config: ModelConfig = replace(mixed_decoder.CONFIG, **changes)
    return load_decoder(RandomCheckpoint(config, form), Precision.of(dtype), None)


def engine_of(decoder: Decoder, **limits: Any) -> Engine:
    config = EngineConfig(**{**LIMITS, "deterministic": True, **limits})
    draft = {"draft_model": _draft_for(decoder)} if limits.get("num_speculative_tokens") == 3 else {}
    engine = Engine(decoder, ToyTokenizer(), config, **draft)  # type: ignore[arg-type]
    for tensor in (tensor for cache in engine.worker.kv_cache for tensor in cache.tensors):
        tensor.view(torch.uint8).fill_(0xFF)  # NaN
    return engine


def _draft_for(decoder: Decoder) -> Decoder:
    """The model itself, or another one if it cannot draft."""
    if decoder.config.states is None:
        return decoder
    return load_decoder(RandomCheckpoint(mixed_decoder.CONFIG), Precision.of("auto"), None)


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


def test_answers(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = {"max_num_seqs": 1, "enable_prefix_caching": False, "enforce_eager": True}
    with monkeypatch.context() as patch:  # all layers compute all tokens
        patch.setattr(ModelConfig, "num_storing_layers", property(lambda config: config.num_layers))
        expected = answers(engine_of(decoder, **alone))
    assert len({tuple(tokens) for tokens, _ in expected}) > 1
    for name, way in WAYS.items():
        assert way(decoder) == expected, name


def test_keys_of_indexers_return_from_host_memory() -> None:
    config = replace(mixed_decoder.CONFIG, **INDEXER)
    decoder = load_decoder(RandomCheckpoint(config), Precision.of("auto"), None)
    expected = answers(engine_of(decoder, max_num_seqs=1, enable_prefix_caching=False))
    engine = engine_of(decoder, num_kv_blocks=13, max_model_len=88, kv_offloading_size=0.05)
    for _ in range(2):
        assert answers(engine) == expected
    assert engine.stats().num_loaded_host_blocks > 0


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
