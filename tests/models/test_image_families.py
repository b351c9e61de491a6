"""Families whose images transformers' model encodes as a whole, against transformers, in fp32."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from support.image_families import FAMILIES, IMAGE_ID, expected, processed, save_model
from support.image_models import picture
from support.toy import drain

from fastinfer import LLM, SamplingParams
from fastinfer.errors import FastinferError, RequestError
from fastinfer.serving.prompt import prepare_chat

# Of odd sizes.
IMAGES = [picture(37, 21, 1), picture(20, 61, 2), picture(9, 5), picture(150, 90, 3)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=1)


def conversation(images: list[Any]) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": image} for image in images]
    first = [{"type": "text", "text": "Look:"}, parts[0], {"type": "text", "text": " and "}, *parts[1:]]
    return [{"role": "user", "content": first}, {"role": "user", "content": "What is it?"}]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, save_model(folder, request.param), folder


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_log_probabilities(model: tuple[str, Any, Path], count: int) -> None:
    """A prompt in several chunks, the text that follows it, and that after the cached prompt are compared."""
    family, reference, folder = model
    messages = conversation(IMAGES[:count])
    inputs = processed(folder, family, messages)
    llm = LLM(str(folder), dtype="float32", device="cpu", max_num_batched_tokens=97, max_num_seqs=8, block_size=8)
    first = llm.chat(messages, PARAMS)
    again = llm.chat(messages, PARAMS)
    whole = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, logprobs=1))
    assert first.prompt_token_ids == inputs["input_ids"][0].tolist()
    assert first.prompt_token_ids.count(IMAGE_ID) > 12 * count
    assert again.num_cached_tokens > len(first.prompt_token_ids) - 16 - 70
    ids = first.prompt_token_ids + first.outputs[0].token_ids
    wanted = expected(reference, inputs, ids)
    assert wanted[:-1].argmax(-1).unique().numel() > 5  # else everything would agree
    prompt = [entry for entry in whole.prompt_logprobs or () if entry]
    for output in first, again:
        found = prompt + output.outputs[0].logprobs
        assert len(found) == len(ids) - 1
        for row, token_id, entry in zip(wanted, ids[1:], found, strict=False):
            assert abs(entry[token_id].logprob - float(row[token_id])) < 1e-4
            assert abs(max(each.logprob for each in entry.values()) - float(row.max())) < 1e-4


@pytest.mark.slow
def test_layouts_of_all_shapes(model: tuple[str, Any, Path]) -> None:
    """An image has as many rows as its layout says, however narrow it is, or is refused."""
    _, _, folder = model
    encoder = LLM(str(folder), dtype="float32", device="cpu").engine.image_encoder
    assert encoder is not None
    numbers, num_refused = random.Random(0), 0
    for width, height in [
        (1, 1),
        (1, 300),
        (300, 1),
        (3, 700),
        *(numbers.choices(range(1, 99), k=2) for _ in range(8)),
    ]:
        image = picture(width, height)
        try:
            layout = encoder.layout(image)
        except RequestError:
            num_refused += 1
            continue
        assert layout.text.count(encoder.placeholder()) == len(layout.runs)
        assert encoder.encode(image, "").num_tokens == sum(layout.runs)
    assert num_refused <= 3


@pytest.mark.parametrize("family", ["gemma4-unified", "mistral3"])
def test_files_of_other_ages(family: str, tmp_path: Path) -> None:
    """One file for all processors, and names of tensors without that of the whole model."""
    save_model(tmp_path, family)
    messages, path = conversation(IMAGES[:2]), tmp_path / "model.safetensors"
    wanted = LLM(str(tmp_path), dtype="float32", device="cpu").chat(messages, PARAMS)
    processor = json.loads((tmp_path / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").unlink()
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": processor}))
    tensors = {re.sub("^model.(vision_tower|multi_modal)", r"\1", name): each for name, each in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})
    found = LLM(str(tmp_path), dtype="float32", device="cpu").chat(messages, PARAMS)
    assert found.outputs[0].logprobs == wanted.outputs[0].logprobs


@pytest.mark.slow
def test_a_batch(model: tuple[str, Any, Path]) -> None:
    """Conversations that run together have the answers of each by itself, bit for bit."""
    _, _, folder = model
    chats = [conversation(images) for images in (IMAGES[:1], IMAGES[1:3], IMAGES[2:], IMAGES[:1])]
    options = {"dtype": "float32", "device": "cpu", "max_num_batched_tokens": 131, "block_size": 8}
    alone = LLM(str(folder), **options, max_num_seqs=1, enable_prefix_caching=False)
    expected_outputs = [alone.chat(chat, PARAMS).outputs[0] for chat in chats]
    engine = LLM(str(folder), **options, max_num_seqs=8).engine
    prompts = [prepare_chat(engine, chat) for chat in chats]
    checked = [engine.validate(prompt.token_ids, PARAMS, images=prompt.images) for prompt in prompts]
    ids = [engine.add_request(each, PARAMS) for each in checked]
    outputs = drain(engine)
    for request_id, wanted in zip(ids, expected_outputs, strict=True):
        [found] = outputs[request_id].outputs
        assert (found.token_ids, found.logprobs) == (wanted.token_ids, wanted.logprobs)


@pytest.mark.parametrize(
    ("family", "name", "values", "message"),
    [
        ("gemma4-inputs", "preprocessor_config.json", {"patch_size": 8}, "patch_size of the image processor must be 4"),
        ("gemma4-inputs", "config.json", {"vision_config": None}, "images need a vision_config, got none"),
        (
            "idefics3",
            "preprocessor_config.json",
            {"max_image_size": {"longest_edge": 64}},
            "processor must be 32, got 64",
        ),
        (
            "internvl",
            "preprocessor_config.json",
            {"size": {"height": 32, "width": 64}},
            "size of the image processor must",
        ),
        ("mistral3", "preprocessor_config.json", {"do_resize": False}, "do_resize of the image processor must be True"),
    ],
)
def test_contradictions_are_refused(
    family: str, name: str, values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_model(tmp_path, family)
    path = tmp_path / name
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    llm = LLM(str(tmp_path), dtype="float32", device="cpu")
    with pytest.raises(FastinferError, match=re.escape(message)):
        llm.chat(conversation(IMAGES[:1]), PARAMS)
    assert llm.chat([{"role": "user", "content": "text"}], PARAMS).outputs[0].text


def test_shared_keys_in_both_directions_are_refused(tmp_path: Path) -> None:
    save_model(tmp_path, "gemma4-inputs", {"use_bidirectional_attention": "vision"})
    message = "images need num_kv_shared_layers of 0 with use_bidirectional_attention, got 3"
    with pytest.raises(FastinferError, match=message):
        LLM(str(tmp_path), dtype="float32", device="cpu").chat(conversation(IMAGES[:1]), PARAMS)
