"""Options of engines whose model is divided among processes: the same texts as without, bit for bit."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.kv_files import wait_for_files
from support.peft_adapter import MODULES, write_adapter
from support.tiny_folder import write_tiny_folder

from fastinfer import LLM, SamplingParams
from fastinfer import llm as llm_module
from fastinfer.engine.config import EngineConfig
from fastinfer.errors import RequestError
from fastinfer.models import open_checkpoint

PROMPTS = [{"prompt_token_ids": ids} for ids in ([*range(3, 60)], [7, 8, 9], [5, 6] * 20, [*range(3, 40), 5])]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, logprobs=3, prompt_logprobs=1, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, temperature=0.9, seed=11, top_p=0.9, logprobs=2, ignore_eos=True)
LIMITS: dict[str, Any] = {"kv_cache_memory": 2**22, "max_num_batched_tokens": 24, "block_size": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("llama3"))


def texts(llm: LLM, params: SamplingParams, adapter: Any = None) -> list[Any]:
    """Tokens and log-probabilities of all completions."""
    outputs = llm.generate(PROMPTS, params, adapter=adapter)
    return [(output.prompt_logprobs, part.token_ids, part.logprobs) for output in outputs for part in output.outputs]


@pytest.mark.parametrize(
    "places",
    [
        {"tensor_parallel_size": 3},
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
        {"device": "cpu,cpu,cpu"},
    ],
    ids=str,
)
def test_adapters(folder: Path, tmp_path: Path, places: dict[str, Any]) -> None:
    config = open_checkpoint(folder).config
    for seed, modules in enumerate([MODULES, ("q_proj", "v_proj"), ("o_proj", "down_proj")]):
        write_adapter(tmp_path / str(seed), config, rank=3 + seed, modules=modules, seed=seed, size=2.0)
    options = LIMITS | {"max_loras": 2, "max_lora_rank": 8}
    whole = LLM(str(folder), **options)
    divided = LLM(str(folder), **places, **options)
    for llm in (whole, divided):
        for name in "012":
            llm.load_adapter(name, tmp_path / name)
    # Three adapters take turns in two slots.
    for names in (["0", None, "1", "0"], ["2", "1", "1", None], ["0", "2", "0", "2"], [None] * 4):
        for params in (GREEDY, SAMPLED):
            assert texts(divided, params, names) == texts(whole, params, names)
    assert texts(divided, GREEDY, "0") != texts(divided, GREEDY)
    divided.sleep(level=2)
    divided.wake_up()
    assert texts(divided, GREEDY, ["0", "2", None, "1"]) == texts(whole, GREEDY, ["0", "2", None, "1"])


def test_sums_of_ranks(folder: Path) -> None:
    """Close to one process, and the same beside other requests, with prefix hits and in recorded steps."""
    divided = LLM(str(folder), dtype="float32", tensor_parallel_size=2, tensor_parallel_layout="reduce", **LIMITS)
    together = texts(divided, GREEDY)
    assert texts(divided, GREEDY) == together
    alone = [divided.generate(prompt, GREEDY)[0] for prompt in PROMPTS]
    assert [(out.prompt_logprobs, out.outputs[0].token_ids, out.outputs[0].logprobs) for out in alone] == together
    assert divided.engine.stats().num_failed_graphs == 0
    whole = LLM(str(folder), dtype="float32", **LIMITS)
    for ours, theirs in zip(divided.score(PROMPTS), whole.score(PROMPTS), strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_layout": "sum"}, r"tensor_parallel_layout must be one of .*, got 'sum'"),
        ({"tensor_parallel_layout": "reduce", "max_loras": 1}, "max_loras must be 0 with .*'reduce', got 1"),
        ({"tensor_parallel_layout": "reduce"}, "'reduce' needs a tensor_parallel_size of at least 2, got 1"),
    ],
)
def test_refused_layouts(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        EngineConfig(**options)


@pytest.mark.parametrize("options", [{"num_speculative_tokens": 3}, {"num_speculative_tokens": 2, "draft_model": ""}])
@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
def test_speculation(folder: Path, tmp_path: Path, options: dict[str, Any], kind: str) -> None:
    if "draft_model" in options:
        options = options | {"draft_model": str(write_tiny_folder(tmp_path, sizes={"num_hidden_layers": 1}))}
    plain = LLM(str(folder), **LIMITS)
    divided = LLM(str(folder), **{f"{kind}_parallel_size": 2}, **options, **LIMITS)
    # As many drafts as there are, whatever the time of steps is.
    divided.engine.speculator._choose = lambda _, available: available  # type: ignore[method-assign, union-attr]
    for params in (GREEDY, SAMPLED):
        assert texts(divided, params) == texts(plain, params)
    assert divided.engine.stats().num_drafted_tokens > 0


@pytest.mark.parametrize(
    ("family", "tensor", "pipeline"), [("qwen3.5", 2, 1), ("granite-hybrid-dense", 1, 2), ("deepseek-v2", 2, 1)]
)
def test_layers_with_states_and_latents(family: str, tensor: int, pipeline: int, tmp_path: Path) -> None:
    """With snapshots of states in the prefix cache, and drafts after which states are chosen."""
    write_tiny_folder(tmp_path, family)
    plain = LLM(str(tmp_path), **LIMITS)
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    divided = LLM(str(tmp_path), num_speculative_tokens=2, **sizes, **LIMITS)
    divided.engine.speculator._choose = lambda _, available: available  # type: ignore[method-assign, union-attr]
    for params in (GREEDY, SAMPLED, GREEDY):
        assert texts(divided, params) == texts(plain, params)
    stats = divided.engine.stats()
    assert stats.num_hit_tokens > 0
    assert stats.num_drafted_tokens > 0
    assert stats.num_failed_graphs == 0


def test_sparse_attention(folder: Path) -> None:
    """Generated tokens attend to chosen pages beside tiles of prompts."""
    sparse = LIMITS | {"sparse_attention": 0.6, "block_size": 4, "max_num_batched_tokens": 32}
    one = LLM(str(folder), **sparse)
    four = LLM(str(folder), tensor_parallel_size=2, pipeline_parallel_size=2, **sparse)
    params = SamplingParams(max_tokens=40, temperature=0.0, logprobs=1, ignore_eos=True)
    assert texts(four, params) == texts(one, params) != texts(LLM(str(folder), **LIMITS), params)


@pytest.mark.parametrize(
    "places", [{"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, {"device": "cpu,cpu"}], ids=str
)
def test_blocks_beyond_the_cache(folder: Path, tmp_path: Path, places: dict[str, Any]) -> None:
    """The cache has room for two prompts, host memory for two more, and a folder for all."""
    draft = write_tiny_folder(tmp_path / "draft", sizes={"num_hidden_layers": 1})  # all of which is in the first place
    limits = LIMITS | {"max_model_len": 80, "num_speculative_tokens": 2, "draft_model": str(draft)}
    stores = {"kv_offloading_size": 1e-4, "kv_offloading_dir": str(tmp_path / "blocks"), "kv_offloading_dir_size": 0.1}
    prompts: Any = [{"prompt_token_ids": [start, *range(3, 63)]} for start in range(70, 76)]
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    whole = LLM(str(folder), **(limits | {"kv_cache_memory": 2**20}))
    parts = LLM(str(folder), **(limits | {"kv_cache_memory": 120_000}), **stores, **places)
    assert parts.engine.offloading is not None
    assert parts.engine.offloading.disk is not None
    for texts_again in (prompts, prompts[::-1]):
        for prompt in texts_again:
            ours, theirs = (llm.generate(prompt, params)[0].outputs[0].token_ids for llm in (parts, whole))
            assert ours == theirs
        wait_for_files(parts.engine.offloading.disk)
    stats = parts.engine.stats()
    assert stats.num_loaded_host_blocks > 0
    assert stats.num_loaded_disk_blocks > 0
    assert stats.num_damaged_kv_files == 0


@pytest.mark.parametrize(
    ("family", "places"),
    [
        ("lfm2", {}),
        ("qwen3.5", {"tensor_parallel_size": 2}),
        ("granite-hybrid-dense", {"pipeline_parallel_size": 2}),
        ("falcon-h1", {}),
    ],
    ids=str,
)
def test_states_beyond_the_cache(
    family: str, places: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache has room for the blocks and snapshots of one prompt, host memory for a few, and a folder for all."""
    write_tiny_folder(tmp_path / "model", family)
    whole = LLM(str(tmp_path / "model"), **LIMITS)
    limits = LIMITS | {"max_model_len": 80, "max_num_seqs": 3, "kv_cache_memory": None}
    stores = {"kv_offloading_dir": str(tmp_path / "blocks"), "kv_offloading_size": 1e-3}
    prompts: Any = [{"prompt_token_ids": [start, *range(3, 63)]} for start in range(70, 76)]
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=1)
    expected = [whole.generate(prompt, params)[0].outputs[0] for prompt in prompts]
    monkeypatch.setattr(llm_module, "EngineConfig", partial(EngineConfig, num_kv_blocks=11))
    for again in range(2):  # by another engine, whose host memory is empty
        parts = LLM(str(tmp_path / "model"), **limits, **stores, **places)
        assert parts.engine.offloading is not None
        assert parts.engine.offloading.disk is not None
        for order in (1, -1):
            for prompt, output in list(zip(prompts, expected, strict=True))[::order]:
                ours = parts.generate(prompt, params)[0].outputs[0]
                assert (ours.token_ids, ours.logprobs) == (output.token_ids, output.logprobs)
            wait_for_files(parts.engine.offloading.disk)
        stats = parts.engine.stats()
        # Of 61 tokens the last 5 are computed again.
        num_computed = [61 * 6 + 5 * 6, 5 * 12][again]
        assert stats.num_prompt_tokens == num_computed
        assert stats.num_loaded_host_blocks > 0
        assert stats.num_loaded_disk_blocks > 0 or not again
        assert stats.num_damaged_kv_files == 0


def test_steps_that_run_ahead(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = LLM(str(folder), **LIMITS)
    monkeypatch.setattr(llm_module, "EngineConfig", partial(EngineConfig, async_scheduling=True))
    divided = LLM(str(folder), tensor_parallel_size=2, **LIMITS)
    params = SamplingParams(max_tokens=12, temperature=0.9, seed=11, ignore_eos=True)
    assert texts(divided, params) == texts(plain, params)
