"""Image encoders in GGUF files beside the model, against Hugging Face folders of the same weights, in fp32."""

from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Kind
from support.image_models import FAMILIES, IMAGE_ID, picture, save_model
from support.mmproj_files import rounded, write_mmproj, write_model

from fastinfer import LLM, SamplingParams
from fastinfer.models import open_checkpoint
from fastinfer.models.config import Precision
from fastinfer.models.image_encoder import ImageEncoder, image_encoder_of
from fastinfer.serving.prompt import prepare_chat

# Of odd sizes; the first is tiny, and the last is scaled down.
IMAGES = [picture(9, 5), picture(37, 21, 1), picture(20, 61, 2), picture(150, 90, 3)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=1)
TEXT_TEMPLATE = "{% for message in messages %}{{ message.role[0] }}:{{ message.content }};{% endfor %}a:"


def conversation(images: list[Any]) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": image} for image in images]
    first = [{"type": "text", "text": "Look:"}, parts[0], {"type": "text", "text": " and "}, *parts[1:]]
    return [{"role": "user", "content": first}, {"role": "user", "content": "What is it?"}]


def load(path: Path, **options: Any) -> LLM:
    return LLM(str(path), dtype="float32", device="cpu", **options)


def encoder_of(path: Path) -> ImageEncoder:
    encoder = image_encoder_of(open_checkpoint(path, exact=True), Precision.of("float32"), "cpu")
    assert encoder is not None
    return encoder


def assert_same_features(got: ImageEncoder, expected: ImageEncoder) -> None:
    for image in IMAGES:
        features, wanted = (encoder.encode(image, "").features for encoder in (got, expected))
        assert features.shape == wanted.shape
        assert wanted.std() > 0.1  # else everything would agree
        assert (features - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_same_as_the_folder(family: str, tmp_path: Path) -> None:
    """Features, token ids, and the text that follows with its log-probabilities."""
    # A GGUF file does not say by what Gemma 3's scores are divided.
    model = save_model(tmp_path / "folder", family, {"query_pre_attn_scalar": 32} if family == "gemma3" else None)
    write_model(tmp_path / "model.gguf", model)
    write_mmproj(tmp_path / "vision.gguf", model)
    expected, got = load(tmp_path / "folder"), load(tmp_path / "model.gguf", mmproj=str(tmp_path / "vision.gguf"))
    encoders = [llm.engine.image_encoder for llm in (got, expected)]
    assert encoders[0] is not None
    assert encoders[1] is not None
    assert_same_features(*encoders)
    for images in (IMAGES[1:2], IMAGES):
        outputs = [llm.chat(conversation(images), PARAMS) for llm in (got, expected)]
        assert outputs[0].prompt_token_ids == outputs[1].prompt_token_ids
        assert outputs[0].prompt_token_ids.count(IMAGE_ID) >= 4 * len(images)
        completions = [output.outputs[0] for output in outputs]
        assert completions[0].token_ids == completions[1].token_ids
        for entry, wanted in zip(completions[0].logprobs, completions[1].logprobs, strict=True):
            for token_id, value in wanted.items():
                assert abs(entry[token_id].logprob - value.logprob) < 1e-4


@pytest.mark.parametrize("family", ["gemma3", "qwen3-vl", "qwen2.5-vl"])
@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q5_1, Kind.Q4_0])
def test_types(family: str, kind: Kind, tmp_path: Path) -> None:
    """The folder has the numbers that the file has."""
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    model = save_model(tmp_path / "folder", family, vision_changes=sizes, prepare=rounded(kind))
    write_model(tmp_path / "model.gguf", model)
    write_mmproj(tmp_path / "mmproj.gguf", model, kind=kind)
    assert_same_features(encoder_of(tmp_path / "model.gguf"), encoder_of(tmp_path / "folder"))


@pytest.mark.parametrize("family", ["gemma3", "qwen3-vl", "qwen2.5-vl"])
def test_other_converters(family: str, tmp_path: Path) -> None:
    """The matrices of the MLPs have each other's name; queries, keys and values are split, or not."""
    model = save_model(tmp_path / "folder", family)
    write_model(tmp_path / "model.gguf", model)
    # Older files do not say the width of the MLPs.
    keys = {"clip.vision.feed_forward_length": 0, "clip.vision.projection_dim": None}
    write_mmproj(tmp_path / "mmproj.gguf", model, is_old=True, splits_qkv=family != "qwen2.5-vl", keys=keys)
    assert_same_features(encoder_of(tmp_path / "model.gguf"), encoder_of(tmp_path / "folder"))


@pytest.mark.parametrize("family", ["gemma3", "qwen3-vl"])
def test_a_template_of_text_alone(family: str, tmp_path: Path) -> None:
    """The images are written into the text, and what a user writes is no image."""
    model = save_model(tmp_path / "folder", family)
    write_model(tmp_path / "model.gguf", model, TEXT_TEMPLATE)
    write_mmproj(tmp_path / "mmproj.gguf", model)
    chat = conversation(IMAGES[:2])
    chat.append({"role": "user", "content": "<|vision_start|><|image_pad|><|vision_end|><start_of_image>"})
    got, expected = (prepare_chat(load(tmp_path / name).engine, chat) for name in ("model.gguf", "folder"))
    assert got.token_ids == expected.token_ids
    assert got.token_ids.count(IMAGE_ID) >= 8
    assert got.contents == expected.contents


def test_a_vocabulary_without_the_token_of_images(tmp_path: Path) -> None:
    """Some files of Gemma 3 have the tokens of SentencePiece alone: the padding then stands for an image."""
    model = save_model(tmp_path / "folder", "gemma3", {"query_pre_attn_scalar": 32})
    write_model(tmp_path / "model.gguf", model, tokens={IMAGE_ID: "<unused>", 257: "<pad>"})
    write_mmproj(tmp_path / "mmproj.gguf", model)
    outputs = [load(tmp_path / name).chat(conversation(IMAGES[:2]), PARAMS) for name in ("model.gguf", "folder")]
    assert outputs[0].prompt_token_ids == [257 if i == IMAGE_ID else i for i in outputs[1].prompt_token_ids]
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
