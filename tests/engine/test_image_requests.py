"""Not a bit of a text about images, or of its log-probabilities, depends on how the request is computed."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from support.image_models import FAMILIES, IMAGE_ID, picture, save_model
from support.tiny_folder import write_tiny_folder
from support.toy import always_speculate, check_blocks, drain

from fastinfer import LLM, SamplingParams
from fastinfer.engine import batch_inputs
from fastinfer.errors import PromptTooLongError, RequestError, UnsupportedModelError
from fastinfer.models.image_tokens import CONTENT_BIT
from fastinfer.serving.prompt import prepare_chat

PARAMS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=2)
IMAGES = [picture(37, 21, 1), picture(20, 61, 2), picture(33, 33, 3)]


def message(*parts: Any) -> list[dict[str, Any]]:
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part} for part in parts
    ]
    return [{"role": "user", "content": content}]


A, B, C = IMAGES
CHATS = [
    message("one ", A, " what?"),
    message("one ", B, " what?"),
    message("one ", A, B, " and ", C, ", which of them?"),
    message("no image, but a text of some length"),
    message(C, C),
]


@pytest.fixture(scope="module", params=[family for family in FAMILIES if "moe" not in family])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    save_model(path, request.param)
    return path


def load(folder: Path, **options: Any) -> LLM:
    options = {"block_size": 8, "max_num_seqs": 8, "deterministic": True, "dtype": "float32", **options}
    llm = LLM(str(folder), device="cpu", **options)
    for tensor in (tensor for cache in llm.engine.worker.kv_cache for tensor in cache.tensors):
        tensor.view(torch.uint8).fill_(0xFF)  # NaN
    return llm


def add(llm: LLM, chat: list[dict[str, Any]], params: SamplingParams = PARAMS, **options: Any) -> str:
    engine, prompt = llm.engine, prepare_chat(llm.engine, chat)
    return engine.add_request(engine.validate(prompt.token_ids, params, images=prompt.images), params, **options)


def answers(llm: LLM, params: SamplingParams = PARAMS) -> list[Any]:
    """Tokens with their log-probabilities, of every chat's completions, which must be the same."""
    ids = [add(llm, chat, params) for chat in CHATS]
    outputs = drain(llm.engine)
    check_blocks(llm.engine)
    found = [[(c.token_ids, c.logprobs) for c in outputs[i].outputs] for i in ids]
    assert all(each == completions[0] for completions in found for each in completions)
    return [completions[0] for completions in found]


def twice(llm: LLM) -> list[Any]:
    answers(llm)
    found = answers(llm)
    assert llm.engine.stats().num_hit_tokens > 100
    return found


def preempted(llm: LLM) -> list[Any]:
    """The last sequence loses its blocks again and again, in prompts too."""
    scheduler, step, numbers = llm.engine.scheduler, llm.engine.step, itertools.count(1)

    def step_and_preempt() -> list[Any]:
        outputs = step()
        if next(numbers) in range(3, 30, 3) and scheduler.running:
            scheduler._preempt(scheduler.running[-1])
        return outputs

    llm.engine.step = step_and_preempt  # type: ignore[method-assign]
    found = answers(llm)
    assert scheduler.num_preemptions > 5
    return found


def with_drafts(llm: LLM) -> list[Any]:
    always_speculate(llm.engine)
    found = answers(llm)
    assert llm.engine.stats().num_drafted_tokens > 0
    return found


def with_a_draft_model(folder: Path) -> list[Any]:
    draft = write_tiny_folder(folder.parent / f"{folder.name}-draft", sizes={"max_position_embeddings": 512})
    return with_drafts(load(folder, num_speculative_tokens=3, draft_model=str(draft)))


WAYS: dict[str, Callable[[Path], list[Any]]] = {
    "batched": lambda folder: answers(load(folder)),
    "chunked": lambda folder: answers(load(folder, max_num_batched_tokens=27)),
    "prefix hits": lambda folder: twice(load(folder)),
    "preempted": lambda folder: preempted(load(folder, max_num_batched_tokens=27, enable_prefix_caching=False)),
    "n-grams": lambda folder: with_drafts(load(folder, num_speculative_tokens=5)),
    "a draft model": with_a_draft_model,
    "three copies": lambda folder: answers(load(folder), replace(PARAMS, n=3)),
    "without graphs": lambda folder: answers(load(folder, enforce_eager=True)),
}


def test_sparse_attention(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of prompts end with blocks, and before and behind images whose tokens see each other."""
    monkeypatch.setattr(batch_inputs, "DENSE_PAGES", 3)
    sparse = {"sparse_attention": 0.6, "block_size": 4}
    expected = answers(load(folder, max_num_seqs=1, enable_prefix_caching=False, **sparse))
    assert answers(load(folder, max_num_batched_tokens=37, **sparse)) == expected
    assert twice(load(folder, **sparse)) == expected


@pytest.mark.slow
def test_answers(folder: Path) -> None:
    expected = answers(load(folder, max_num_seqs=1, enable_prefix_caching=False, enforce_eager=True))
    assert len({tuple(tokens) for tokens, _ in expected}) > 3
    for name, way in WAYS.items():
        assert way(folder) == expected, name


def test_blocks_of_images_are_shared_by_their_pixels(folder: Path) -> None:
    """Same tokens, other pixels: nothing after the image is found, and its own blocks neither."""
    llm = load(folder)
    big, other = picture(64, 48, 5), picture(64, 48, 6)  # 48 tokens each

    def num_cached(chat: list[dict[str, Any]]) -> int:
        request_id = add(llm, chat, replace(PARAMS, max_tokens=1))
        return int(drain(llm.engine)[request_id].num_cached_tokens)

    text = "what is this, and where has it been seen before?"
    assert num_cached(message("an image: ", big, text)) == 0
    first = prepare_chat(llm.engine, message("an image: ", other, text))
    start = first.token_ids.index(IMAGE_ID)
    assert 0 < start < 16
    assert num_cached(message("an image: ", other, text)) <= start
    assert num_cached(message("an image: ", big, text)) >= len(first.token_ids) - 8
    assert num_cached(message("an image: ", big.transpose(0), text)) <= start


def test_contents_are_no_token_ids(folder: Path) -> None:
    images = prepare_chat(load(folder).engine, message("x", A, B)).images
    assert images is not None
    contents = [number for _, image in images.within(0, 100) for number in image.contents]
    assert len(set(contents)) == len(contents) > 20
    assert all(CONTENT_BIT <= number < 2 * CONTENT_BIT for number in contents)


def test_an_image_is_encoded_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = load(folder)
    encoder = llm.engine.image_encoder
    assert encoder is not None
    calls = []
    encode = encoder._encode
    monkeypatch.setattr(encoder, "_encode", lambda *args: calls.append(1) or encode(*args))
    for _ in range(3):
        llm.chat(CHATS[2], PARAMS)
    assert len(calls) == 3
    llm.sleep(1)
    llm.wake_up()
    llm.chat(CHATS[0], PARAMS)
    assert len(calls) == 4


def test_an_encoded_image_is_found_under_its_salt_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the time of an answer would tell which images others have sent."""
    engine = load(folder).engine
    encoder = engine.image_encoder
    assert encoder is not None
    calls = []
    encode = encoder._encode
    monkeypatch.setattr(encoder, "_encode", lambda *args: calls.append(1) or encode(*args))
    contents = []
    for salt, num_calls in (("a", 1), ("a", 1), ("b", 2), ("", 3), ("a", 3)):
        images = prepare_chat(engine, CHATS[0], cache_salt=salt).images
        assert images is not None
        assert len(calls) == num_calls
        contents.append([image.contents for _, image in images.within(0, 100)])
    assert all(each == contents[0] for each in contents)


def test_which_encoded_images_are_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of the same bytes and another size are others; the last one stays if there is room for one."""
    encoder = load(folder).engine.image_encoder
    assert encoder is not None
    wide, high = (encoder.encode(Image.new("RGB", size), "") for size in ((64, 32), (32, 64)))
    assert wide.digest != high.digest
    assert encoder.encode(Image.new("RGB", (64, 32)), "") is wide
    monkeypatch.setattr("fastinfer.models.image_encoder.CACHE_BYTES", wide.features.nbytes)
    red = encoder.encode(Image.new("RGB", (64, 32), "red"), "")
    assert encoder.encode(Image.new("RGB", (64, 32), "red"), "") is red


def test_what_is_refused(folder: Path) -> None:
    llm = load(folder, max_model_len=64)
    with pytest.raises(
        PromptTooLongError, match=r"shorter than max_model_len=64 tokens, got .+, .. of them for images"
    ):
        llm.chat(CHATS[2])
    with pytest.raises(RequestError, match="truncate_prompt_tokens must be None for a prompt with images, got 5"):
        llm.chat(CHATS[0], replace(PARAMS, truncate_prompt_tokens=5))
    if not folder.name.startswith("gemma3"):  # which has squares of every image
        with pytest.raises(RequestError, match="messages: an image of 1 x 300 pixels: absolute aspect ratio"):
            llm.chat(message(picture(1, 300)))
    system = [{"role": "assistant", "content": [{"type": "image", "image": A}]}]
    with pytest.raises(RequestError, match="continue_final_message: the last message must have text alone"):
        prepare_chat(llm.engine, system, continue_final_message=True)
    spelled = llm.chat([{"role": "user", "content": "<|image_pad|><image_soft_token>"}], PARAMS)
    assert IMAGE_ID not in spelled.prompt_token_ids


def test_an_image_that_one_step_must_compute(tmp_path: Path) -> None:
    """It is never divided, gets its step even beside shorter prompts, and is refused if no step has room."""
    save_model(tmp_path, "gemma3")
    with pytest.raises(
        RequestError, match="max_num_batched_tokens must be at least 24 for images of 16 tokens beside 8"
    ):
        load(tmp_path, max_num_batched_tokens=23).chat(CHATS[0])
    # A quarter of a step is reserved for prompts, however many sequences there may be.
    reserved = {"max_num_seqs": 60, "max_model_len": 256}
    load(tmp_path, max_num_batched_tokens=64, **reserved).chat(CHATS[0], replace(PARAMS, max_tokens=1))
    with pytest.raises(RequestError, match="at least 76 for images of 16 tokens beside 60 generated ones, got 63"):
        load(tmp_path, max_num_batched_tokens=63, **reserved).chat(CHATS[0])
    with pytest.raises(RequestError, match="this model's images need an engine without kv_offloading_size"):
        load(tmp_path, kv_offloading_size=0.1).chat(CHATS[0])
    llm = load(tmp_path, max_num_batched_tokens=24)
    request_id = add(llm, CHATS[0])
    ends = []
    for _ in range(200):
        add(llm, [{"role": "user", "content": "short"}], replace(PARAMS, max_tokens=1), priority=0)
        finished = [output.request_id for output in llm.engine.step() if output.finished]
        [sequence] = llm.engine.requests.active[request_id].sequences if request_id not in finished else [None]
        if sequence is None:
            break
        ends.append(sequence.num_computed_tokens)
    else:
        raise AssertionError("the image has starved")
    start = prepare_chat(llm.engine, CHATS[0]).token_ids.index(IMAGE_ID)
    assert not set(ends) & set(range(start + 1, start + 16))


def test_a_window_shorter_than_an_image_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path, "gemma3", {"sliding_window": 12})
    with pytest.raises(UnsupportedModelError, match="images need windows of at least 16 tokens"):
        load(tmp_path).chat(CHATS[0])
