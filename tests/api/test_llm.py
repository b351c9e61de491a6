"""The Python API on the default model, computed in fp32."""

import dataclasses
import gc
import re
import threading
from collections import deque
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.kv_files import wait_for_files
from support.tiny_folder import write_tiny_folder

import fastinfer
from fastinfer import LLM, RequestError, RequestOutput, RequestOutputKind, SamplingParams, models
from fastinfer.engine import kv_cache_size
from fastinfer.errors import ModelNotFoundError
from fastinfer.utils import device

PROMPTS = [
    "Once upon a time",
    "The capital of France is",
    "def fibonacci(n):",
    "Wasser kocht bei",
    "1, 2, 3, 4,",
    "A",
    "In the beginning " * 20,
]
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


def greedy(max_tokens: int = 24, **fields: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **fields)  # type: ignore[arg-type]


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


@pytest.fixture(scope="module")
def llm(model_path: Path) -> LLM:
    return LLM(str(model_path), dtype="float32", max_model_len=512, max_num_seqs=8)


def test_batched_equals_one_by_one(llm: LLM) -> None:
    batched = llm.generate(PROMPTS, greedy())
    alone = [llm.generate(prompt, greedy())[0] for prompt in PROMPTS]
    assert [output.outputs[0].token_ids for output in batched] == [output.outputs[0].token_ids for output in alone]
    assert texts(batched) == texts(alone)
    assert [output.prompt for output in batched] == PROMPTS


def test_chunked_prefill_and_preemption_change_no_text(llm: LLM, model_path: Path) -> None:
    tight = LLM(
        str(model_path),
        dtype="float32",
        max_model_len=128,
        max_num_batched_tokens=7,
        block_size=16,
        kv_cache_memory=6_000_000,
    )
    assert texts(tight.generate(PROMPTS, greedy(40))) == texts(llm.generate(PROMPTS, greedy(40)))
    assert tight.engine.stats().num_preemptions > 0
    assert tight.engine.stats().num_used_blocks == 0


def test_an_abandoned_stream_may_be_collected_in_the_middle_of_a_step(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing it must not wait for the lock that this very thread holds."""
    stream = llm.stream_outputs(PROMPTS[0], greedy(ignore_eos=True))
    next(stream)
    cycle = [stream]
    cycle.append(cycle)  # type: ignore[arg-type]  # as a traceback makes one
    del stream, cycle
    step = llm.engine.step_into

    def collecting_step(outputs: deque[RequestOutput]) -> None:
        gc.collect()
        step(outputs)

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step_into", collecting_step)
        finished = threading.Event()
        thread = threading.Thread(target=lambda: (llm.generate("Hi", greedy(4)), finished.set()), daemon=True)
        thread.start()
        assert finished.wait(60), "generate hangs"
    llm.generate("Hi", greedy(1))
    assert llm.engine.stats().num_used_blocks == 0


def test_the_text_is_sensible(llm: LLM) -> None:
    assert "Paris" in llm.generate("The capital of France is", greedy())[0].outputs[0].text
    assert "Paris" in llm.chat(MESSAGES, greedy()).outputs[0].text


def test_forms_of_a_prompt(llm: LLM) -> None:
    text = PROMPTS[0]
    ids = llm.tokenizer.encode(text)
    plain, as_dict, as_ids = llm.generate([text, {"prompt": text}, {"prompt_token_ids": ids}], greedy())
    assert plain.outputs[0].token_ids == as_dict.outputs[0].token_ids == as_ids.outputs[0].token_ids
    assert plain.prompt_token_ids == as_dict.prompt_token_ids == as_ids.prompt_token_ids == ids
    assert (plain.prompt, as_dict.prompt, as_ids.prompt) == (text, text, None)
    assert llm.generate([], greedy()) == []


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt must have at least 1 token, got 0"),
        ("word " * 600, "prompt must be shorter than max_model_len=512 tokens, got"),
        ({"prompt_token_ids": []}, "prompt must have at least 1 token"),
        ({"prompt_token_ids": [10**6]}, "prompt_token_ids must be an integer in 0..49151, got 1000000"),
        ({"prompt_token_ids": "123"}, "prompt_token_ids must be a list, got str"),
        ({"prompt": 5}, "prompt must be a string"),
        ({"text": "a"}, "prompt must be a string, .* got \\['text'\\]"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "prompt must be a string"),
        (5, "prompt must be a string, .* got int"),
        (None, "prompt must be a string, .* got NoneType"),
        ("\ud800", "lone surrogate"),
    ],
)
def test_a_prompt_that_cannot_be_served_stops_everything_before_it_runs(llm: LLM, prompt: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(["fine", prompt], greedy())  # type: ignore[list-item]
    with pytest.raises(RequestError, match=message):
        llm.stream(prompt, greedy())  # type: ignore[arg-type]
    assert not llm.engine.has_unfinished


def test_finished_outputs_have_the_whole_text(llm: LLM) -> None:
    for kind in RequestOutputKind:
        params = greedy(5, output_kind=kind)
        [output], answer = llm.generate(PROMPTS[0], params), llm.chat(MESSAGES, params)
        for finished in (output, answer):
            assert len(finished.outputs[0].token_ids) == 5
            assert finished.outputs[0].text == llm.tokenizer.decode(finished.outputs[0].token_ids)


def test_params_per_prompt(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS[:3], [greedy(1), greedy(5), greedy(3)])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 5, 3]
    assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * 3
    for count in (2, 4):
        with pytest.raises(RequestError, match=f"params must be one or 3, as many as prompts, got {count}"):
            llm.generate(PROMPTS[:3], [greedy()] * count)
    with pytest.raises(RequestError, match="params must be SamplingParams, got dict"):
        llm.generate("a", {"temperature": 0})  # type: ignore[arg-type]


def test_stop_strings(llm: LLM) -> None:
    text = llm.generate(PROMPTS[0], greedy())[0].outputs[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 6]
    completion = llm.generate(PROMPTS[0], greedy(stop=stop))[0].outputs[0]
    assert completion.text == text[: text.index(stop)]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert "".join(llm.stream(PROMPTS[0], greedy(stop=[stop]))) == completion.text


def test_eos_and_ignore_eos(llm: LLM) -> None:
    ended = llm.chat(MESSAGES, greedy(100)).outputs[0]
    assert ended.finish_reason == "stop"
    assert ended.token_ids[-1] in llm.tokenizer.eos_ids
    assert "<|im_end|>" not in ended.text
    count = len(ended.token_ids) + 5
    longer = llm.chat(MESSAGES, greedy(count, ignore_eos=True, skip_special_tokens=False)).outputs[0]
    assert longer.token_ids[: len(ended.token_ids)] == ended.token_ids
    assert len(longer.token_ids) == count
    assert longer.finish_reason == "length"
    assert longer.text.startswith(ended.text + "<|im_end|>")


def test_the_context_ends_the_text(llm: LLM) -> None:
    output = llm.generate({"prompt_token_ids": [5] * 508}, greedy(100, ignore_eos=True))[0]
    assert len(output.outputs[0].token_ids) == 4
    assert output.outputs[0].finish_reason == "length"


def test_logprobs(llm: LLM) -> None:
    completion = llm.generate(PROMPTS[1], greedy(6, logprobs=3))[0].outputs[0]
    assert completion.logprobs is not None
    for token_id, entries in zip(completion.token_ids, completion.logprobs, strict=True):
        assert len(entries) == 3
        assert entries[token_id].rank == 1
        assert entries[token_id].logprob == max(entry.logprob for entry in entries.values()) <= 0
    joined = "".join(
        entries[i].decoded_token for i, entries in zip(completion.token_ids, completion.logprobs, strict=True)
    )
    assert joined == completion.text


def test_seeds_reproduce(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=16, seed=7)
    alone = llm.generate(PROMPTS[0], params)[0].outputs[0].token_ids
    among = llm.generate(PROMPTS, params)
    assert among[0].outputs[0].token_ids == alone
    other = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=16, seed=8)
    assert llm.generate(PROMPTS[0], other)[0].outputs[0].token_ids != alone


@pytest.mark.parametrize("prompt", [PROMPTS[0], "Write an emoji: 😀😃😄"])
def test_pieces_join_to_the_text(llm: LLM, prompt: str) -> None:
    expected = llm.generate(prompt, greedy())[0].outputs[0]
    pieces = list(llm.stream(prompt, greedy()))
    assert "".join(pieces) == expected.text
    assert all(pieces)
    assert len(pieces) > 5
    outputs = list(llm.stream_outputs(prompt, greedy()))
    assert outputs[-1].outputs[0].token_ids == expected.token_ids
    assert [output.finished for output in outputs].count(True) == 1
    for earlier, later in pairwise(outputs):
        assert later.outputs[0].text == earlier.outputs[0].text + later.outputs[0].delta


def test_stream_chat_equals_chat(llm: LLM) -> None:
    outputs = list(llm.stream_chat(MESSAGES, greedy()))
    assert outputs[-1].outputs[0].text == llm.chat(MESSAGES, greedy()).outputs[0].text
    with pytest.raises(RequestError, match="messages"):
        llm.stream_chat([], greedy())


def test_closing_a_stream_aborts_its_request(llm: LLM) -> None:
    for stream in (llm.stream(PROMPTS[0], greedy(400)), llm.stream_outputs(PROMPTS[0], greedy(400))):
        next(stream)
        assert llm.engine.stats().num_used_blocks > 0
        stream.close()
        assert not llm.engine.has_unfinished
        assert llm.engine.stats().num_used_blocks == 0
    llm.stream(PROMPTS[0], greedy())  # never started, so never added
    assert not llm.engine.has_unfinished


def test_streams_of_one_thread_may_be_interleaved(llm: LLM) -> None:
    expected = texts(llm.generate(PROMPTS[:2], greedy()))
    first, second = (llm.stream(prompt, greedy()) for prompt in PROMPTS[:2])
    pieces = [next(first), next(second), next(first)]
    between = llm.generate(PROMPTS[2], greedy())[0].outputs[0].text
    assert pieces[0] + pieces[2] + "".join(first) == expected[0]
    assert pieces[1] + "".join(second) == expected[1]
    assert between == llm.generate(PROMPTS[2], greedy())[0].outputs[0].text


def test_threads(llm: LLM) -> None:
    expected = texts(llm.generate(PROMPTS[:4], greedy()))
    got: dict[int, str] = {}

    def work(index: int) -> None:
        if index % 2:
            got[index] = "".join(llm.stream(PROMPTS[index], greedy()))
        else:
            got[index] = llm.generate(PROMPTS[index], greedy())[0].outputs[0].text

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert [got[index] for index in range(4)] == expected
    assert not llm.engine.has_unfinished
    assert not llm._shared._inboxes


def test_a_failing_step_leaves_no_request_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(type(llm.engine.model), "forward", broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            llm.generate(PROMPTS, greedy())
    assert not llm.engine.has_unfinished
    assert llm.engine.stats().num_used_blocks == 0
    assert llm.generate(PROMPTS[0], greedy(2))[0].finished


def test_progress_bar(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(PROMPTS[:2], greedy(2), use_tqdm=True)
    assert "2/2" in capsys.readouterr().err
    llm.generate(PROMPTS[:2], greedy(2))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "int3"}, "dtype must be one of auto, float32, bfloat16, float16, got 'int3'"),
        ({"device": "tpu"}, "device must be auto, cpu, cuda or cuda:N, got 'tpu'"),
        ({"max_model_len": 0}, "max_model_len must be an integer in 1.."),
        ({"max_model_len": 10**9}, "max_model_len must be at most the model's"),
        ({"max_num_seqs": True}, "max_num_seqs must be an integer"),
        ({"kv_cache_memory": 1000}, "one block needs a KV cache of .* bytes, got 0"),
        ({"max_stop_strings": -1}, "max_stop_strings must be an integer in 0.."),
        ({"max_stop_string_length": -1}, "max_stop_string_length must be an integer in 0.."),
        ({"max_stop_token_ids": -1}, "max_stop_token_ids must be an integer in 0.."),
        ({"max_logit_bias": -1}, "max_logit_bias must be an integer in 0.."),
        ({"kv_offloading_size": 1e-9}, "kv_offloading_size must hold at least one block of 737280 bytes, got 1e-09"),
        ({"kv_offloading_size": 1e9}, "kv_offloading_size must be at most the host's"),
        ({"kv_offloading_dir": "/proc/x"}, "kv_offloading_dir must be a folder that can be written to, got /proc/x"),
    ],
)
def test_arguments_out_of_range(model_path: Path, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        LLM(str(model_path), **arguments)  # type: ignore[arg-type]


def test_a_later_process_reads_what_was_computed(model_path: Path, tmp_path: Path) -> None:
    def run(**options: Any) -> tuple[list[int], int]:
        llm = LLM(str(model_path), kv_offloading_dir=tmp_path, max_model_len=512, **options)
        [output] = llm.generate({"prompt_token_ids": list(range(100, 320))}, greedy(5))
        assert llm.engine.offloading is not None
        assert llm.engine.offloading.disk is not None
        wait_for_files(llm.engine.offloading.disk)
        return output.outputs[0].token_ids, output.num_cached_tokens

    token_ids, num_cached_tokens = run()
    assert num_cached_tokens == 0
    assert run() == (token_ids, 192)
    assert run(kv_cache_dtype="int8")[1] == 0
    assert run(kv_cache_dtype="int8")[1] == 192
    assert run(dtype="bfloat16", kv_cache_dtype="float16")[1] == 0, "the weights' precision is another one"


def test_a_draft_model_is_checked_before_the_weights_are_read(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "load_decoder", lambda *args: pytest.fail("the weights are being read"))
    with pytest.raises(RequestError, match="a draft model needs num_speculative_tokens of at least 1, got 0"):
        LLM(str(model_path), draft_model=str(model_path))


def test_the_longest_context_that_fits_is_announced_before_the_weights_are_read(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Read(Exception):
        """The weights are being read."""

    def read(*args: object) -> None:
        raise Read

    size = model_path.stat().st_size
    monkeypatch.setattr(kv_cache_size, "available_memory", lambda device: size + 100 * 2**20)
    monkeypatch.setattr(models, "load_decoder", read)
    with pytest.raises(Read):
        LLM(str(model_path))
    [line] = caplog.messages
    given = re.fullmatch(
        r"\S+: max_model_len is (\S+) tokens instead of the model's 8,192, .* To change it: "
        r"max_model_len \(--context\), kv_cache_dtype \(--kv-cache-dtype\) or kv_cache_memory",
        line,
    )
    assert given is not None
    # 30 layers, 3 KV heads of 64 elements, keys and values in fp16; blocks of 32 tokens. Half of 100 MiB is for them,
    # and of the file what is not weights.
    longest = int(given[1].replace(",", ""))
    assert 50 * 2**20 // (30 * 3 * 64 * 4 * 32) * 32 <= longest < 55 * 2**20 // (30 * 3 * 64 * 4 * 32) * 32
    caplog.clear()
    with pytest.raises(Read):
        LLM(str(model_path), max_model_len=1000)
    assert caplog.messages == []
    with pytest.raises(RequestError, match="max_model_len=8192 needs a KV cache of"):
        LLM(str(model_path), max_model_len=8192)


def test_a_gpu_that_cannot_be_used_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    monkeypatch.setattr(device, "NVIDIA_DRIVER", Path("/no/such/file"))
    assert device.resolve_device("auto") == "cpu"
    assert caplog.messages == []
    monkeypatch.setattr(device, "NVIDIA_DRIVER", Path(__file__))
    assert device.resolve_device("auto") == "cpu"
    [line] = caplog.messages
    assert line.startswith("this machine has a GPU, but the model runs on the CPU: the GPU needs a ")
    caplog.clear()
    assert device.resolve_device("cpu") == "cpu"
    assert caplog.messages == []
    folder = str(write_tiny_folder(tmp_path / "model"))
    LLM(folder, max_model_len=32, device="auto")
    assert caplog.messages == [line]
    caplog.clear()
    LLM(folder, max_model_len=32, device="cpu")
    assert caplog.messages == []


def test_unknown_model() -> None:
    with pytest.raises(ModelNotFoundError, match="no-such-model"):
        LLM("no-such-model")


def test_module_function_keeps_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    first = fastinfer.generate("The capital of France is", max_tokens=8, temperature=0.0)
    assert "Paris" in first
    monkeypatch.setattr("fastinfer.llm.load_model", None)  # a second load would fail
    assert fastinfer.generate("The capital of France is", max_tokens=8, temperature=0.0) == first
    loaded = fastinfer.llm._loaded(fastinfer.hub.DEFAULT_MODEL)
    params = dataclasses.replace(loaded.default_params, seed=1, max_tokens=30)
    assert params.temperature < 1
    assert fastinfer.generate("Once", seed=1, max_tokens=30) == loaded.generate("Once", params)[0].outputs[0].text


def test_lazy_exports() -> None:
    assert {"LLM", "SamplingParams", "generate", "__version__"} <= set(dir(fastinfer))
    assert all(getattr(fastinfer, name) is not None for name in fastinfer.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = fastinfer.nonsense
