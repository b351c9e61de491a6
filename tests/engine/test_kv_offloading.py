"""An engine with stores beyond its KV cache: every text is that without them, and blocks are found again."""

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.kv_files import GIB, damage, kv_files, restore, size_of, wait_for_files
from support.peft_adapter import write_adapter
from support.stages import use_stages
from support.tiny_decoder import CONFIG, make_decoder
from support.toy import VOCAB_SIZE, Forgetful, ToyModel, ToyTokenizer, always_speculate, check_blocks, drain, toy_engine
from support.toy_grammar import Letters, constrained

from fastinfer.engine.block_store import HostBlockStore
from fastinfer.engine.config import EngineConfig
from fastinfer.engine.construction import make_offloading
from fastinfer.engine.engine import Engine
from fastinfer.engine.prefix_hash import BlockContent
from fastinfer.engine.transfer import HostCopy, pinned_bytes
from fastinfer.errors import RequestError
from fastinfer.sampling_params import BeamSearchParams, SamplingParams

NUM_DAMAGES = int(os.environ.get("FASTINFER_DAMAGES", "1000"))
PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=6, ignore_eos=True)
PROMPTS = [[(7 * i + 3 * j) % VOCAB_SIZE for j in range(3 + 9 * i)] for i in range(6)]
# Full blocks of the prompts before their last tokens.
NUM_PROMPT_BLOCKS = sum((len(prompt) - 1) // 4 for prompt in PROMPTS)


def make_engine(folder: Path | None = None, **limits: Any) -> Engine:
    return toy_engine(kv_offloading_dir=folder, **{"block_size": 4} | limits)


def flush(engine: Engine) -> None:
    assert engine.offloading is not None
    if engine.offloading.disk is not None:
        wait_for_files(engine.offloading.disk)


def complete(engine: Engine, prompts: list[list[int]], params: SamplingParams = PARAMS) -> list[Any]:
    """The completions of each prompt, all at once, with the blocks checked after each step."""
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    outputs: dict[str, Any] = {}
    while engine.has_unfinished:
        outputs.update({output.request_id: output for output in engine.step()})
        check_blocks(engine)
    return [outputs[i].outputs for i in ids]


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("max_num_batched_tokens", [1, 7, 512])
def test_a_later_engine_computes_the_last_tokens_only(
    max_num_batched_tokens: int, async_scheduling: bool, tmp_path: Path
) -> None:
    expected = complete(toy_engine(), PROMPTS)
    limits = {"max_num_batched_tokens": max_num_batched_tokens, "async_scheduling": async_scheduling}
    first = make_engine(tmp_path, **limits)
    assert complete(first, PROMPTS) == expected
    flush(first)
    second = make_engine(tmp_path, **limits)
    assert complete(second, PROMPTS) == expected
    stats = second.stats()
    assert stats.num_loaded_disk_blocks == NUM_PROMPT_BLOCKS
    assert stats.num_prompt_tokens == sum(map(len, PROMPTS)) - 4 * NUM_PROMPT_BLOCKS
    assert (stats.num_damaged_kv_files, stats.num_failed_kv_files, stats.num_dropped_kv_blocks) == (0, 0, 0)
    assert stats.num_loaded_host_blocks == 0


def test_a_reset_of_the_prefix_cache_empties_host_memory_and_leaves_the_files(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, num_kv_blocks=14, max_model_len=40, kv_offloading_size=2**20 / GIB)
    assert engine.offloading is not None
    assert engine.offloading.host is not None
    for prompt in PROMPTS[:4]:
        complete(engine, [prompt])
    assert len(engine.offloading.host) > 0
    flush(engine)
    num_files = len(kv_files(tmp_path))
    engine.reset_prefix_cache()
    assert (len(engine.offloading.host), engine.stats().num_cached_blocks) == (0, 0)
    check_blocks(engine)
    assert len(kv_files(tmp_path)) == num_files > 0


def test_stages_store_the_blocks_of_their_last_step(tmp_path: Path) -> None:
    engine = use_stages(make_engine(tmp_path), 3)
    engine.add_request([1, 2, 3], PARAMS)  # its last step fills the second block
    drain(engine)
    check_blocks(engine)
    flush(engine)
    assert len(kv_files(tmp_path)) == 2


def test_a_later_process_finds_the_blocks(tmp_path: Path) -> None:
    """Keys do not depend on the process: Python's own hashes of strings would."""
    script = """
import sys
from pathlib import Path
from test_kv_offloading import PROMPTS, complete, make_engine
engine = make_engine(Path(sys.argv[1]))
print([[c.token_ids for c in outputs] for outputs in complete(engine, PROMPTS)])
print(engine.stats().num_loaded_disk_blocks)
"""
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1]), *sys.path])
    results = []
    for seed in "12":
        environment = os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", script, str(tmp_path)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        results.append(done.stdout.splitlines())
    assert results[0][0] == results[1][0]
    assert [result[1] for result in results] == ["0", str(NUM_PROMPT_BLOCKS)]


def test_processes_share_a_folder(tmp_path: Path) -> None:
    """They write and remove the same files at the same time, as the folder is too small for all."""
    script = """
import random, sys
from pathlib import Path
from support.toy import toy_engine
from test_kv_offloading import GIB, complete, make_engine
pool = random.Random(0)
prompts = [[pool.randrange(64) for _ in range(pool.randrange(4, 60))] for _ in range(12)]
rng = random.Random(int(sys.argv[2]))
engine = make_engine(Path(sys.argv[1]), num_kv_blocks=30, kv_offloading_dir_size=8000 / GIB)
for _ in range(60):
    prompt = rng.choice(prompts)
    assert complete(engine, [prompt]) == complete(toy_engine(), [prompt])
stats = engine.stats()
print(stats.num_loaded_disk_blocks, stats.num_damaged_kv_files, stats.num_failed_kv_files)
"""
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1]), *sys.path])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path), str(seed)],
            env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in range(2)
    ]
    for process in processes:
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0
        num_loaded, *num_troubles = map(int, output.split())
        assert num_loaded > 0
        assert num_troubles == [0, 0]
    assert size_of(tmp_path) <= 8000 + 500


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_evicted_blocks_return_from_host_memory(async_scheduling: bool) -> None:
    engine = toy_engine(
        block_size=4,
        max_model_len=64,
        num_kv_blocks=16,
        kv_offloading_size=1_000_000 / GIB,
        async_scheduling=async_scheduling,
    )
    for _ in range(2):
        for prompt in PROMPTS:
            assert complete(engine, [prompt]) == complete(toy_engine(), [prompt])
    stats = engine.stats()
    assert stats.num_loaded_host_blocks > NUM_PROMPT_BLOCKS / 2
    assert stats.num_loaded_disk_blocks == 0
    # Together the cache and the store hold everything: nothing but the last blocks was computed twice.
    assert stats.num_prompt_tokens <= sum(map(len, PROMPTS)) + 4 * len(PROMPTS)


def test_host_memory_is_limited() -> None:
    block_bytes = 64  # 4 tokens, 2 layers, keys and values of 4 bytes
    engine = toy_engine(block_size=4, max_model_len=64, num_kv_blocks=16, kv_offloading_size=5.5 * block_bytes / GIB)
    assert engine.offloading is not None
    assert engine.offloading.host is not None
    for _ in range(2):
        for prompt in PROMPTS:
            assert complete(engine, [prompt]) == complete(toy_engine(), [prompt])
    assert len(engine.offloading.host) == 5


def test_host_memory_is_asked_before_the_disk(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, max_model_len=64, num_kv_blocks=16, kv_offloading_size=1_000_000 / GIB)
    for _ in range(2):
        for prompt in PROMPTS:
            assert complete(engine, [prompt]) == complete(toy_engine(), [prompt])
            flush(engine)
    assert engine.stats().num_loaded_host_blocks > 0
    assert engine.stats().num_loaded_disk_blocks == 0


def test_preempted_sequences_return_from_host_memory() -> None:
    limits = {"block_size": 2, "num_kv_blocks": 26, "max_model_len": 48, "max_num_batched_tokens": 16}
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True)
    prompts = [prompt[:20] for prompt in PROMPTS]
    expected = complete(toy_engine(), prompts, params)
    engine = toy_engine(kv_offloading_size=1_000_000 / GIB, **limits)
    assert complete(engine, prompts, params) == expected
    plain = toy_engine(**limits)
    assert complete(plain, prompts, params) == expected
    assert engine.stats().num_preemptions > 0
    assert engine.stats().num_loaded_host_blocks > 0
    computed = [sum(e.model.batch_sizes) for e in (engine, plain)]  # type: ignore[attr-defined]
    assert computed[0] < computed[1]


@pytest.mark.parametrize("speculation", ["none", "ngram", "draft model"])
def test_all_kinds_of_requests(speculation: str, tmp_path: Path) -> None:
    def run(folder: Path | None) -> tuple[Any, Engine]:
        engine = make_engine(
            folder,
            draft_model=Forgetful() if speculation == "draft model" else None,
            num_speculative_tokens=0 if speculation == "none" else 3,
            max_num_batched_tokens=16,
        )
        if speculation != "none":
            always_speculate(engine)
        prompt = PROMPTS[4]
        engine.add_request(prompt, SamplingParams(temperature=1.0, seed=9, max_tokens=9, n=3, ignore_eos=True))
        engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=9, logprobs=2, prompt_logprobs=1))
        engine.add_request(prompt, PARAMS, cache_salt="x")
        engine.add_beam_request(prompt, BeamSearchParams(beam_width=2, max_tokens=6))
        engine.add_embedding_request(prompt, pooling="mean")
        engine.add_embedding_request(prompt, pooling="last")
        engine.pin_prompt("m", PROMPTS[5])
        constrained(engine, prompt, SamplingParams(temperature=1.0, seed=0, max_tokens=8), Letters("abc", 7))
        outputs = drain(engine)
        check_blocks(engine)
        texts = {
            name: [(c.text, c.token_ids, c.finish_reason, c.logprobs) for c in output.outputs]
            if hasattr(output, "outputs")
            else output.embedding
            for name, output in outputs.items()
        }
        return texts, engine

    expected, _ = run(None)
    for is_second in (False, True):
        texts, engine = run(tmp_path)
        assert texts == expected
        assert (engine.stats().num_loaded_disk_blocks > 0) == is_second
        flush(engine)


def test_prompts_of_another_salt_share_nothing(tmp_path: Path) -> None:
    first, second = make_engine(tmp_path), make_engine(tmp_path)
    first.add_request(PROMPTS[5], PARAMS, cache_salt="mine")
    drain(first)
    flush(first)
    for salt, has_hits in (("", False), ("theirs", False), ("mine", True)):
        second.add_request(PROMPTS[5], PARAMS, cache_salt=salt)
        drain(second)
        assert (second.stats().num_loaded_disk_blocks > 0) == has_hits


def test_a_prefix_that_stays_in_the_cache_stays_on_disk(tmp_path: Path) -> None:
    """Its files would be the oldest ones, although every request uses it."""
    engine = make_engine(tmp_path)
    complete(engine, [PROMPTS[5]])
    flush(engine)
    for path in kv_files(tmp_path):
        os.utime(path, ns=(0, 0))
    complete(engine, [[*PROMPTS[5][:17], 5, 6]])  # 4 blocks of the prefix, and 2 that end with generated tokens
    flush(engine)
    assert sum(path.stat().st_mtime_ns > 0 for path in kv_files(tmp_path)) == 6
    for path in kv_files(tmp_path):
        path.unlink()
    complete(engine, [[*PROMPTS[5][:17], 7, 8]])
    flush(engine)
    assert len(kv_files(tmp_path)) == 6


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_damaged_files_never_change_a_text(async_scheduling: bool, tmp_path: Path) -> None:
    """FASTINFER_DAMAGES is the number of attempts."""
    rng = random.Random(int(async_scheduling))
    prompt = PROMPTS[3]
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    expected = complete(toy_engine(), [prompt], params)
    engine = make_engine(tmp_path / "own", async_scheduling=async_scheduling)
    complete(engine, [prompt], params)
    other = toy_engine(
        block_size=4, kv_offloading_dir=tmp_path / "other", draft_model=ToyModel(), num_speculative_tokens=1
    )
    complete(other, [prompt], params)
    for filled in (engine, other):
        flush(filled)
    contents = {path: path.read_bytes() for path in kv_files(tmp_path / "own")}
    foreign = [path.read_bytes() for path in kv_files(tmp_path / "other")]
    assert len(contents) == 7
    assert foreign
    for _ in range(NUM_DAMAGES):
        engine.block_manager.reset_prefix_cache()
        kind = damage(rng, contents, foreign)
        assert complete(engine, [prompt], params) == expected, kind
        flush(engine)
        restore(contents)
    stats = engine.stats()
    assert stats.num_damaged_kv_files > NUM_DAMAGES / 4
    assert 0 < stats.num_loaded_disk_blocks < 7 * NUM_DAMAGES


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn, torch.uint8]


def decoder_engine(folder: Path, *, fingerprint: str = "weights", **limits: Any) -> Engine:
    options = {"block_size": 4, "kv_offloading_dir": folder, "lora_dtype": torch.float32}
    model = make_decoder(replace(CONFIG, vocab_size=VOCAB_SIZE))
    return Engine(model, ToyTokenizer(), EngineConfig(**options | limits), fingerprint=fingerprint)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_of_the_cache(dtype: torch.dtype, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1)
    prompts = [prompt[:40] for prompt in PROMPTS]
    first = decoder_engine(tmp_path, kv_cache_dtype=dtype)
    expected = complete(first, prompts, params)
    flush(first)
    second = decoder_engine(tmp_path, kv_cache_dtype=dtype)
    assert complete(second, prompts, params) == expected
    assert second.stats().num_loaded_disk_blocks > 10
    third = decoder_engine(tmp_path, kv_cache_dtype=next(other for other in DTYPES if other != dtype))
    complete(third, prompts, params)
    assert third.stats().num_loaded_disk_blocks == 0
    assert third.stats().num_damaged_kv_files == 0


@pytest.mark.parametrize(
    "changed",
    [
        {"fingerprint": "others"},
        {"block_size": 8},
        {"deterministic": True},
        {"max_loras": 1},
        {"lora_dtype": torch.bfloat16},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_blocks_of_another_configuration_are_not_found(changed: dict[str, Any], tmp_path: Path) -> None:
    first = decoder_engine(tmp_path, kv_cache_dtype=torch.float32)
    complete(first, PROMPTS[:5])
    flush(first)
    engine = decoder_engine(tmp_path, **{"kv_cache_dtype": torch.float32} | changed)
    complete(engine, PROMPTS[:5])
    assert engine.stats().num_loaded_disk_blocks == 0


def test_an_adapter_is_known_by_its_matrices(tmp_path: Path) -> None:
    """Not by its name, which stands for another adapter in another process."""
    sizes = replace(CONFIG, vocab_size=VOCAB_SIZE)
    for seed, name in enumerate("ab"):
        write_adapter(tmp_path / name, sizes, rank=3, seed=seed, size=2.0)

    def run(folder: str, name: str, adapter: str) -> tuple[list[int], int]:
        engine = decoder_engine(tmp_path / folder, kv_cache_dtype=torch.float32, max_loras=1)
        engine.load_adapter(name, tmp_path / adapter)
        request_id = engine.add_request(PROMPTS[3], SamplingParams(temperature=0.0, max_tokens=9), adapter=name)
        tokens = drain(engine)[request_id].outputs[0].token_ids
        flush(engine)
        return tokens, engine.stats().num_loaded_disk_blocks

    expected, _ = run("empty", "x", "b")
    of_a, _ = run("shared", "x", "a")
    assert of_a != expected
    assert run("shared", "x", "b") == (expected, 0)
    assert run("shared", "another name", "b") == (expected, 7)


def test_a_store_counts_what_torch_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a GPU are in pinned memory, whose sizes torch rounds up to powers of two."""
    stream = SimpleNamespace(record_event=lambda: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    store = HostBlockStore(300)
    for number, size in enumerate((72, 128, 33)):
        block = torch.full((size,), number, dtype=torch.uint8)
        on_gpu: Any = SimpleNamespace(is_cuda=True, nbytes=size, device="cuda:0", to=lambda *_, copy=block, **__: copy)
        store.put(BlockContent(bytes([number]), b""), HostCopy([on_gpu]))
    assert (len(store), store.num_bytes) == (2, 128 + 64)
    store.recount()
    assert store.num_bytes == 128 + 64
    config: Any = SimpleNamespace(
        has_offloading=True, kv_offloading_size=100 / GIB, kv_offloading_dir=None, device="cuda"
    )
    worker: Any = SimpleNamespace(part_bytes=lambda part: 72)
    with pytest.raises(RequestError, match="kv_offloading_size must hold at least one block of 128 bytes"):
        make_offloading(config, [worker], "")
    assert [pinned_bytes(size) for size in (0, 1, 2, 3, 2**20, 2**20 + 1)] == [0, 1, 2, 4, 2**20, 2**21]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_offloading_size": 0}, r"kv_offloading_size must be a number in \(0.0, .*\], got 0"),
        ({"kv_offloading_size": 1e-9}, "kv_offloading_size must hold at least one block of 64 bytes, got 1e-09 GiB"),
        ({"kv_offloading_size": 1e9}, r"kv_offloading_size must be at most the host's \d+\.\d GiB of memory, got 1000"),
        ({"kv_offloading_dir": 3}, "kv_offloading_dir must be a string or a path, got 3"),
        ({"kv_offloading_dir": "x", "kv_offloading_dir_size": -1}, "kv_offloading_dir_size must be a number in"),
        ({"kv_offloading_dir": "x", "kv_offloading_dir_size": 1e-9}, "kv_offloading_dir_size must hold at least one"),
        ({"kv_offloading_dir": "/proc/x"}, "kv_offloading_dir must be a folder that can be written to, got /proc/x"),
        (
            {"kv_offloading_size": 1, "enable_prefix_caching": False},
            "kv_offloading_size and kv_offloading_dir need enable_prefix_caching=True, got False",
        ),
    ],
)
def test_options_that_cannot_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        toy_engine(block_size=4, **options)


def test_a_folder_needs_the_model_s_identity(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="kv_offloading_dir needs the fingerprint of the models, got none"):
        Engine(ToyModel(), ToyTokenizer(), EngineConfig(kv_offloading_dir=tmp_path))  # type: ignore[arg-type]


def test_loading_holds_nobody_up(tmp_path: Path) -> None:
    """A step loads at most as many tokens as it may compute; others decode in the meantime."""
    long = [(5 * j) % VOCAB_SIZE for j in range(81)]
    first = make_engine(tmp_path)
    complete(first, [long])
    flush(first)
    engine = make_engine(tmp_path, max_num_batched_tokens=16)
    engine.add_request([1, 2], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True), request_id="short")
    engine.step()
    engine.add_request(long, PARAMS, request_id="long")
    loaded, generated = [], []
    for _ in range(7):
        outputs = {output.request_id: output for output in engine.step()}
        loaded.append(engine.stats().num_loaded_disk_blocks)
        generated.append(len(outputs["short"].outputs[0].token_ids))
    assert loaded == [4, 8, 12, 16, 20, 20, 20]
    assert generated == [2, 3, 4, 5, 6, 7, 8]
    drain(engine)


def test_windows_form_one_group(tmp_path: Path) -> None:
    """A stored block has the keys and values of all layers, so none is given back early."""
    expected = complete(toy_engine(model=ToyModel((0, 5))), PROMPTS)
    engine = toy_engine(model=ToyModel((0, 5)), block_size=4, kv_offloading_dir=tmp_path)
    assert len(engine.block_manager.pools) == 1
    assert complete(engine, PROMPTS) == expected
    flush(engine)
    later = toy_engine(model=ToyModel((0, 5)), block_size=4, kv_offloading_dir=tmp_path)
    assert complete(later, PROMPTS) == expected
    assert later.stats().num_loaded_disk_blocks > 0


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_keeps_the_host_s_blocks_if_it_keeps_the_weights(level: int) -> None:
    config = EngineConfig(kv_cache_dtype=torch.float32, block_size=4, num_kv_blocks=24, kv_offloading_size=2**20 / GIB)
    sizes = replace(CONFIG, vocab_size=VOCAB_SIZE)
    models = [make_decoder(sizes)]
    engine = Engine(models[0], ToyTokenizer(), config, load_models=lambda: models)  # type: ignore[arg-type]
    expected = complete(engine, PROMPTS[:5])
    assert engine.offloading is not None
    assert engine.offloading.host is not None
    assert len(engine.offloading.host) > 0
    engine.sleep(level)
    engine.wake_up()
    assert complete(engine, PROMPTS[:5]) == expected
    assert (engine.stats().num_loaded_host_blocks > 0) == (level == 1)


def test_files_belong_to_the_weights_in_memory(tmp_path: Path) -> None:
    engine = Engine(
        make_decoder(replace(CONFIG, vocab_size=VOCAB_SIZE)),
        ToyTokenizer(),  # type: ignore[arg-type]
        EngineConfig(kv_offloading_dir=tmp_path),
        load_models=list,
        fingerprint="weights",
    )
    with pytest.raises(RequestError, match=r"level must be 1 with kv_offloading_dir, .* got 2"):
        engine.sleep(2)
    engine.sleep(1)
