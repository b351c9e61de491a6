"""Families whose images transformers' model encodes as a whole, against transformers, in fp32."""

import random
from pathlib import Path
from typing import Any

import pytest
from support.image_families import FAMILIES, IMAGE_ID, expected, processed, save_model
from support.image_models import picture

from fastinfer import LLM, SamplingParams
from fastinfer.errors import RequestError

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


@pytest.mark.parametrize("count", [1, 4])
def test_log_probabilities(model: tuple[str, Any, Path], count: int) -> None:
    """Of a prompt in several chunks, of the text that follows it, and of that after the cached prompt."""
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
