"""Models of text and images against transformers, in fp32, on small random checkpoints."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.image_models import FAMILIES, IMAGE_ID, expected, picture, save_model

from fastinfer import LLM, SamplingParams
from fastinfer.errors import FastinferError

# Of odd sizes; the first is tiny, and the last is scaled down.
IMAGES = [picture(9, 5), picture(37, 21, 1), picture(20, 61, 2), picture(150, 90, 3)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=1, prompt_logprobs=1)


def conversation(images: list[Any]) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": image} for image in images]
    first = [{"type": "text", "text": "Look:"}, parts[0], {"type": "text", "text": " and "}, *parts[1:]]
    return [{"role": "user", "content": first}, {"role": "user", "content": "What is it?"}]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    return save_model(folder, request.param), folder


def test_log_probabilities(model: tuple[Any, Path]) -> None:
    """Of a prompt in several chunks, and of the text that follows it."""
    reference, folder = model
    llm = LLM(str(folder), dtype="float32", device="cpu", max_num_batched_tokens=37, max_num_seqs=8)
    output = llm.chat(conversation(IMAGES), PARAMS)
    ids = output.prompt_token_ids + output.outputs[0].token_ids
    assert ids.count(IMAGE_ID) > 4 * len(IMAGES)
    wanted = expected(reference, folder, ids, IMAGES)
    assert wanted[:-1].argmax(-1).unique().numel() > 5  # else everything would agree
    found = [entry for entry in output.prompt_logprobs or () if entry] + output.outputs[0].logprobs
    assert len(found) == len(ids) - 1
    for row, token_id, entry in zip(wanted, ids[1:], found, strict=False):
        assert abs(entry[token_id].logprob - float(row[token_id])) < 1e-4
        assert abs(max(each.logprob for each in entry.values()) - float(row.max())) < 1e-4


def test_names_of_older_files(tmp_path: Path) -> None:
    """As Google has published Gemma 3: without a head, and with one more module around the tower."""
    reference = save_model(tmp_path, "gemma3")
    path = tmp_path / "model.safetensors"
    tensors = {name: values for name, values in load_file(path).items() if ".head." not in name}
    names = {name: name.replace("vision_tower.", "vision_tower.vision_model.") for name in tensors}
    assert sum(name != new for name, new in names.items()) > 20
    save_file({names[name]: values for name, values in tensors.items()}, path, {"format": "pt"})
    llm = LLM(str(tmp_path), dtype="float32", device="cpu")
    output = llm.chat(conversation(IMAGES[:1]), PARAMS)
    wanted = expected(reference, tmp_path, output.prompt_token_ids, IMAGES[:1])
    token_id = output.outputs[0].token_ids[0]
    assert abs(output.outputs[0].logprobs[0][token_id].logprob - float(wanted[-1, token_id])) < 1e-4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda name, values: None, "tensor 'model.visual.patch_embed.proj.weight' is missing"),
        (lambda name, values: values[1:], "tensor 'model.visual.patch_embed.proj.weight' must have the shape"),
        (lambda name, values: values.to(torch.int8), "must be of a float dtype, got torch.int8"),
    ],
)
def test_damaged_encoders_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    save_model(tmp_path, "qwen3-vl")
    path, name = tmp_path / "model.safetensors", "model.visual.patch_embed.proj.weight"
    tensors = load_file(path)
    if (values := change(name, tensors.pop(name))) is not None:
        tensors[name] = values
    save_file(tensors, path, {"format": "pt"})
    llm = LLM(str(tmp_path), dtype="float32", device="cpu")
    with pytest.raises(FastinferError, match=re.escape(message)):
        llm.chat(conversation(IMAGES[:1]), PARAMS)
    assert len(llm.chat([{"role": "user", "content": "text"}], PARAMS).outputs[0].token_ids) == 10


@pytest.mark.parametrize(
    ("file", "key", "value", "message"),
    [
        ("preprocessor_config.json", "patch_size", 8, "patch_size of the image processor must be 4, got 8"),
        ("preprocessor_config.json", "merge_size", 1, "merge_size of the image processor must be 2, got 1"),
        ("config.json", "mrope_section", [7, 5, 5], "mrope_section must be three numbers that add up to 16"),
        ("config.json", "out_hidden_size", 32, "vision_config.out_hidden_size must be 64, got 32"),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, file: str, key: str, value: Any, message: str) -> None:
    save_model(tmp_path, "qwen3-vl")
    path = tmp_path / file
    values = json.loads(path.read_text())
    place = {"mrope_section": ("text_config", "rope_parameters"), "out_hidden_size": ("vision_config",)}.get(key, ())
    owner = values
    for name in place:
        owner = owner[name]
    owner[key] = value
    path.write_text(json.dumps(values))
    llm = LLM(str(tmp_path), dtype="float32", device="cpu")
    with pytest.raises(FastinferError, match=re.escape(message)):
        llm.chat(conversation(IMAGES[:1]), PARAMS)


def test_a_model_without_its_positions_or_features_is_another_one(model: tuple[Any, Path]) -> None:
    """What the test above can see: the same prompt with another image, and with the same one turned."""
    _, folder = model
    llm = LLM(str(folder), dtype="float32", device="cpu")
    outputs = [llm.chat(conversation([image]), PARAMS) for image in (IMAGES[1], IMAGES[1].transpose(2), IMAGES[2])]
    assert len({str(output.prompt_logprobs) for output in outputs}) == 3
