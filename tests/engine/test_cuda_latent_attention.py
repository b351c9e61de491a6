"""Models with latent attention on the CUDA kernels, emulated, against the CPU's in fp32, however a request is computed.

Among them whole models like Kimi Linear and Bailing hybrid, with linear attention and experts.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.fake_cuda_graph import use_fakes, use_graphs
from support.helpers import device_fixture
from support.mixed_decoder import CONFIG
from support.random_checkpoint import RandomCheckpoint, int4
from support.toy import VOCAB_SIZE, ToyTokenizer, check_blocks, drain
from torch import Tensor

from fastinfer.engine.config import EngineConfig
from fastinfer.engine.engine import Engine
from fastinfer.formats.unpacked import Dense
from fastinfer.models import layer_reader
from fastinfer.models.batch import Batch
from fastinfer.models.config import IndexerConfig, LatentAttentionConfig, Precision, RouterConfig
from fastinfer.models.decoder import Decoder
from fastinfer.models.kv_cache import KVCache
from fastinfer.models.loader import load_decoder
from fastinfer.models.state_config import LinearAttentionConfig
from fastinfer.sampling_params import SamplingParams
from fastinfer.weights.pack import make_weight
from fastinfer.weights.weight import Weight

pytestmark = pytest.mark.unsanitized
device = device_fixture("cuda", "emulated")

SIZES: dict[str, Any] = {
    "num_layers": 3,
    "num_heads": 5,
    "num_kv_heads": 1,
    "head_dim": 320,
    "rotary_dim": 64,
    "attention_scale": 0.1,
    "latent_attention": LatentAttentionConfig(96, 256, 64, 64, 64),
    "query_growth": 0.5,
    "query_length": 20,
    "interleaved_rope": True,
}
# The tokens that a token reads: all, or those that an indexer chooses, in the last layer that of the one before; which
# are all again if no text is longer.
CHOOSES = IndexerConfig(3, 72, 20, interleaved_rope=False, layers=(0, 1, 1))
# Linear attention with decays of channels in the layers around it, no rotations, and experts.
KIMI = {
    "state_layers": (True, False, True),
    "states": LinearAttentionConfig(
        3, 3, 48, 32, 4, separate_projections=True, channel_decay=True, decay_rank=32, gate_rank=64, sigmoid_gate=True
    ),
    "unrotated_layers": frozenset({0, 1, 2}),
    "query_growth": 0.0,
    "num_experts": 6,
    "experts_per_token": 2,
    "router": RouterConfig("sigmoid", has_bias=True, num_groups=3, top_groups=2, scale=1.5),
    "dense_layers": frozenset({0}),
    "dense_intermediate_size": 192,
    "shared_intermediate_size": 64,
}
# Projections of one matrix, decays with a bound, rotations, and gates of the heads of latent attention.
BAILING = KIMI | {
    "states": LinearAttentionConfig(
        3, 3, 48, 32, 4, separate_projections=True, channel_decay=True, sigmoid_gate=True, decay_bound=-5.0
    ),
    "unrotated_layers": frozenset[int](),
    "output_gate": True,
    "separate_gate": True,
    "head_gate": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "all": {},
    "chosen": {"indexer": CHOOSES},
    "all of a short text": {"indexer": replace(CHOOSES, top_k=96)},
    "kimi": KIMI,
    "bailing": BAILING,
}
CHECKPOINTS = {
    name: RandomCheckpoint(
        replace(CONFIG, **SIZES | fields), lambda name, v: Dense(v) if name.endswith("router") else int4(v)
    )
    for name, fields in MODELS.items()
}
BLOCK_SIZE = 16
TEXT = [(7 * i + i // 5) % VOCAB_SIZE for i in range(60)]


def load(name: str, device: str) -> Decoder:
    """Dense weights are in the dtype of hidden states, as a GPU needs them, also where the kernels are emulated."""
    with pytest.MonkeyPatch.context() as patch:
        if device == "cpu":

            def make(unpacked: Any, bits: int, device: str, dense_dtype: None, *more: Any) -> Weight:
                assert dense_dtype is None
                return make_weight(unpacked, bits, device, torch.float16, *more)

            patch.setattr(layer_reader, "make_weight", make)
        return load_decoder(CHECKPOINTS[name], Precision.of("float16", "cuda"), None, device)


def logits_of_text(model: Decoder, dtype: torch.dtype, device: str) -> Tensor:
    """Of the last two of a text, the first after a prompt and the second alone."""
    cache = KVCache.of_model(model.config, [4], BLOCK_SIZE, dtype, device, state_dtype=model.dtype)
    found = []
    for begin, end in ((0, 59), (59, 60)):
        batch = Batch.of_texts([TEXT[:end]], BLOCK_SIZE)
        rows = slice(begin, end)
        # The states after the prompt are in the first slot.
        writes = torch.full((end - begin,), -1, dtype=torch.int32, device=device)
        writes[-1] = 0
        batch = replace(
            batch,
            token_ids=batch.token_ids[rows].to(device),
            positions=batch.positions[rows].to(device),
            query_start=torch.tensor([0, end - begin], dtype=torch.int32, device=device),
            seq_lens=batch.seq_lens.to(device),
            block_tables=tuple(table.to(device) for table in batch.block_tables),
            slot_mappings=tuple(slots[rows].to(device) for slots in batch.slot_mappings),
            logits_indices=torch.tensor([end - begin - 1], device=device),
            state_reads=torch.tensor([0 if begin else -1], dtype=torch.int32, device=device),
            state_writes=writes,
            row_start=torch.arange(end - begin + 1, dtype=torch.int32, device=device),
        )
        found.append(model.logits(model.forward(batch, cache), batch.logits_indices).float().cpu())
    return torch.cat(found)


@pytest.fixture
def expected(name: str) -> Tensor:
    """What the CPU gives in fp32; to be asked for before ``device`` replaces its kernels."""
    return logits_of_text(load_decoder(CHECKPOINTS[name], Precision.of("float32"), None), torch.float32, "cpu")


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_close_to_the_cpus(name: str, expected: Tensor, device: str) -> None:
    model = load(name, device)
    logits = logits_of_text(model, torch.float16, device)
    assert ((logits - expected).norm(dim=1) < 0.02 * expected.norm(dim=1)).all()


PROMPTS = [[(5 * i + 3 * j) % VOCAB_SIZE for j in range(length)] for i, length in enumerate((1, 6, 50, 13))]
PARAMS = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=2)


def answers(name: str, device: str, times: int = 1, *, with_graphs: bool = False, **limits: Any) -> list[Any]:
    options = {"block_size": 8, "num_kv_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 96} | limits
    model = load(name, device)
    is_eager = device == "cpu" or not with_graphs  # graphs of the emulator are fakes
    config = EngineConfig(
        device=device, deterministic=True, enforce_eager=is_eager, kv_cache_dtype=torch.float16, **options
    )
    engine = Engine(model, ToyTokenizer(), config)  # type: ignore[arg-type]
    engine = use_graphs(engine) if device == "cpu" and with_graphs else engine
    for _ in range(times):
        ids = [engine.add_request(prompt, PARAMS) for prompt in PROMPTS]
        outputs = drain(engine)
    check_blocks(engine)
    assert not with_graphs or engine.stats().num_eager_steps == engine.stats().num_failed_graphs == 0
    return [(outputs[i].outputs[0].token_ids, outputs[i].outputs[0].logprobs) for i in ids]


@pytest.mark.parametrize("name", ["all", "chosen", "kimi", "bailing"])
def test_deterministic(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a bit depends on how a request is computed."""
    if device == "cpu":
        use_fakes(monkeypatch)
    expected = answers(name, device, max_num_seqs=1, enable_prefix_caching=False)
    assert answers(name, device) == expected
    assert answers(name, device, max_num_batched_tokens=19) == expected
    assert answers(name, device, times=2) == expected  # prefix hits
    assert answers(name, device, with_graphs=True) == expected  # most steps are padded
