"""Latent attention on the CUDA kernels, emulated, against the CPU's in fp32; and in any way to compute a request."""

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
from fastinfer.models.batch import Batch
from fastinfer.models.config import IndexerConfig, LatentAttentionConfig, Precision
from fastinfer.models.decoder import Decoder
from fastinfer.models.kv_cache import KVCache
from fastinfer.models.loader import load_decoder
from fastinfer.sampling_params import SamplingParams

pytestmark = pytest.mark.unsanitized
device = device_fixture("cuda", "emulated")

SIZES = {
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
READS = {"all": None, "chosen": CHOOSES, "all of a short text": replace(CHOOSES, top_k=96)}
CHECKPOINTS = {
    name: RandomCheckpoint(replace(CONFIG, **SIZES, indexer=indexer), lambda _, values: int4(values))  # type: ignore[arg-type]
    for name, indexer in READS.items()
}
BLOCK_SIZE = 16
TEXT = [(7 * i + i // 5) % VOCAB_SIZE for i in range(60)]


def logits_of_text(model: Decoder, dtype: torch.dtype, device: str) -> Tensor:
    """Of the last two of a text, the first after a prompt and the second alone."""
    cache = KVCache.of_model(model.config, [4], BLOCK_SIZE, dtype, device)
    found = []
    for begin, end in ((0, 59), (59, 60)):
        batch = Batch.of_texts([TEXT[:end]], BLOCK_SIZE)
        rows = slice(begin, end)
        batch = replace(
            batch,
            token_ids=batch.token_ids[rows].to(device),
            positions=batch.positions[rows].to(device),
            query_start=torch.tensor([0, end - begin], dtype=torch.int32, device=device),
            seq_lens=batch.seq_lens.to(device),
            block_tables=tuple(table.to(device) for table in batch.block_tables),
            slot_mappings=tuple(slots[rows].to(device) for slots in batch.slot_mappings),
            logits_indices=torch.tensor([end - begin - 1], device=device),
            state_reads=None,
            state_writes=None,
            row_start=torch.arange(end - begin + 1, dtype=torch.int32, device=device),
        )
        found.append(model.logits(model.forward(batch, cache), batch.logits_indices).float().cpu())
    return torch.cat(found)


@pytest.fixture
def expected(reads: str) -> Tensor:
    """What the CPU gives in fp32; to be asked for before ``device`` replaces its kernels."""
    return logits_of_text(load_decoder(CHECKPOINTS[reads], Precision.of("float32"), None), torch.float32, "cpu")


@pytest.mark.parametrize("reads", READS)
def test_logits_are_close_to_the_cpus(reads: str, expected: Tensor, device: str) -> None:
    model = load_decoder(CHECKPOINTS[reads], Precision.of("float16", "cuda"), None, device)
    logits = logits_of_text(model, torch.float16, device)
    assert ((logits - expected).norm(dim=1) < 0.02 * expected.norm(dim=1)).all()


PROMPTS = [[(5 * i + 3 * j) % VOCAB_SIZE for j in range(length)] for i, length in enumerate((1, 6, 50, 13))]
PARAMS = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=2)


def answers(reads: str, device: str, times: int = 1, *, with_graphs: bool = False, **limits: Any) -> list[Any]:
    options = {"block_size": 8, "num_kv_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 96} | limits
    model = load_decoder(CHECKPOINTS[reads], Precision.of("float16", "cuda"), None, device)
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


@pytest.mark.parametrize("reads", ["all", "chosen"])
def test_deterministic(reads: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a bit depends on how a request is computed."""
    if device == "cpu":
        use_fakes(monkeypatch)
    expected = answers(reads, device, max_num_seqs=1, enable_prefix_caching=False)
    assert answers(reads, device) == expected
    assert answers(reads, device, max_num_batched_tokens=19) == expected
    assert answers(reads, device, times=2) == expected  # prefix hits
    assert answers(reads, device, with_graphs=True) == expected  # most steps are padded
