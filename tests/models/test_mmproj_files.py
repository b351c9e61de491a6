"""Which files of image encoders are found and which are refused, each in one line."""

import asyncio
import base64
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.image_models import picture, save_model
from support.mmproj_files import write_mmproj, write_model
from support.toy_server import toy_client

from fastinfer import LLM, SamplingParams
from fastinfer.errors import FastinferError, RequestError, UnsupportedModelError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.models import open_checkpoint
from fastinfer.models.config import Precision
from fastinfer.models.gguf_checkpoint import GGUFCheckpoint
from fastinfer.models.image_encoder import ImageEncoder, image_encoder_of
from fastinfer.models.mmproj import Mmproj, find_mmproj

IMAGE = picture(37, 21, 1)
CHAT = [{"role": "user", "content": [{"type": "text", "text": "Look: "}, {"type": "image", "image": IMAGE}]}]
PARAMS = SamplingParams(temperature=0.0, max_tokens=4)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Models of transformers by family."""
    families = ("gemma3", "qwen3-vl", "qwen3.5", "qwen2.5-vl")
    return {family: save_model(tmp_path_factory.mktemp(family), family) for family in families}


@pytest.fixture
def folder(models: dict[str, Any], tmp_path: Path) -> Path:
    """A folder with Qwen3-VL's two files."""
    write_model(tmp_path / "model.gguf", models["qwen3-vl"])
    write_mmproj(tmp_path / "mmproj.gguf", models["qwen3-vl"])
    return tmp_path


def checkpoint(path: Path) -> GGUFCheckpoint:
    return GGUFCheckpoint(GGUFFile(path), exact=True)


def found(folder: Path) -> ImageEncoder | None:
    return image_encoder_of(checkpoint(folder / "model.gguf"), Precision.of("float32"), "cpu")


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        ("qwen3-vl", {"clip.projector_type": "pixtral"}, "clip.projector_type must be one of gemma3, qwen2.5vl_merger"),
        ("qwen3-vl", {"clip.projector_type": None}, "metadata key 'clip.vision.projector_type' is missing"),
        ("qwen3-vl", {"clip.has_vision_encoder": None}, "clip.has_vision_encoder must be true, got false"),
        ("qwen3-vl", {"clip.vision.block_count": None}, "metadata key 'clip.vision.block_count' is missing"),
        (
            "qwen3-vl",
            {"clip.vision.image_mean": [0.5]},
            "'clip.vision.image_mean': expected three numbers of -1e+06 to 1e+06, got [0.5]",
        ),
        (
            "qwen3-vl",
            {"clip.vision.image_std": [1, 1, 1]},
            "'clip.vision.image_std': expected three numbers of 1e-06 to",
        ),
        (
            "qwen3-vl",
            {"clip.vision.image_std": [0.5, 0.0, 0.5]},
            "expected three numbers of 1e-06 to 1e+06, got [0.5 0",
        ),
        ("qwen3-vl", {"clip.vision.is_deepstack_layers": [True]}, "expected 3 booleans, got 1 of bool"),
        (
            "qwen3-vl",
            {"clip.vision.is_deepstack_layers": [False, True, False]},
            "expected 2 deepstack layers, as many as model.gguf reads, got 1",
        ),
        ("qwen3-vl", {"clip.vision.attention.head_count": 5}, "must be a multiple of 5 heads, got 48"),
        ("qwen3-vl", {"clip.vision.attention.head_count": 8}, "expected heads of a multiple of 4 elements, got 6"),
        ("qwen3.5", {}, "expected 2 deepstack layers, as many as model.gguf reads, got 0"),
        ("gemma3", {}, "the encoder 'gemma3' needs a model of gemma3, got model.gguf of 'qwen3vl'"),
        ("qwen2.5-vl", {}, "the encoder 'qwen2.5vl_merger' needs a model of qwen2vl, got model.gguf of 'qwen3vl'"),
    ],
)
def test_encoders_that_do_not_fit(
    family: str, keys: dict[str, Any], message: str, models: dict[str, Any], folder: Path
) -> None:
    """Named as an option they are refused; beside the model they are left alone."""
    write_mmproj(folder / "mmproj.gguf", models[family], keys=keys)
    with pytest.raises(FastinferError, match=re.escape(f"{folder / 'mmproj.gguf'}: ")) as caught:
        Mmproj(folder / "mmproj.gguf", checkpoint(folder / "model.gguf"))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert found(folder) is None


def test_another_width(models: dict[str, Any], folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    wide = save_model(tmp_path_factory.mktemp("wide"), "qwen3-vl", vision_changes={"out_hidden_size": 96})
    write_mmproj(folder / "mmproj.gguf", wide)
    message = "tensor 'mm.2.weight' must have 64 outputs, as wide as the embedding of model.gguf, got 96"
    with pytest.raises(FastinferError, match=re.escape(message)):
        Mmproj(folder / "mmproj.gguf", checkpoint(folder / "model.gguf"))


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        ("qwen3-vl", {"clip.vision.block_count": 4}, "tensor 'v.blk.3.ln1.weight' is missing"),
        ("qwen3-vl", {"clip.vision.embedding_length": 2**20}, "'v.blk.2.ln1.weight' must have the shape [1048576]"),
        ("qwen3-vl", {"clip.vision.patch_size": 16}, "'v.patch_embd.weight' must have the shape [48, 3, 16, 16], got"),
        ("qwen3-vl", {"clip.vision.spatial_merge_size": 3}, "'mm.0.weight' must have the shape [432, 432], got"),
        ("gemma3", {"clip.vision.image_size": 64}, "'v.position_embd.weight' must have the shape [256, 48], got"),
        ("gemma3", {"clip.vision.projector.scale_factor": 3}, "expected a multiple of 3 patches in each row"),
    ],
)
def test_sizes_that_are_not_those_of_the_tensors(
    family: str, keys: dict[str, Any], message: str, models: dict[str, Any], tmp_path: Path
) -> None:
    """Memory for these sizes is not asked for."""
    write_model(tmp_path / "model.gguf", models[family])
    keys = {"clip.vision.is_deepstack_layers": None} | keys
    write_mmproj(tmp_path / "mmproj.gguf", models[family], keys=keys)
    with pytest.raises(FastinferError, match=re.escape(message)):
        Mmproj(tmp_path / "mmproj.gguf", checkpoint(tmp_path / "model.gguf"))


@pytest.mark.parametrize("family", ["gemma3", "qwen3-vl"])
def test_a_model_without_a_token_for_images(family: str, models: dict[str, Any], tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", models[family], tokens={300: "<other>"})
    write_mmproj(tmp_path / "mmproj.gguf", models[family])
    model = checkpoint(tmp_path / "model.gguf")
    model.file.metadata.pop("tokenizer.ggml.padding_token_id")
    with pytest.raises(FastinferError, match=r"model\.gguf: images need a token '<.*image_.*'"):
        Mmproj(tmp_path / "mmproj.gguf", model)


def test_files_in_each_other_s_place(folder: Path) -> None:
    with pytest.raises(
        FastinferError, match=r"expected an image encoder \(general.architecture 'clip'\), got 'qwen3vl'"
    ):
        LLM(str(folder / "model.gguf"), mmproj=str(folder / "model.gguf"), device="cpu")
    with pytest.raises(UnsupportedModelError, match=r"mmproj\.gguf: expected a model, got an image encoder"):
        LLM(str(folder / "mmproj.gguf"), device="cpu")


def test_a_folder_has_its_own_encoder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("folder")
    save_model(other, "qwen3-vl")
    with pytest.raises(RequestError, match="mmproj needs a model that is a GGUF file, got"):
        image_encoder_of(open_checkpoint(other), Precision.of("float32"), "cpu", folder / "mmproj.gguf")


def test_the_file_beside_the_model(models: dict[str, Any], folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The only one is taken; of several none is."""
    encoder = found(folder)
    assert encoder is not None
    assert encoder.files == [folder / "mmproj.gguf"]
    assert not caplog.records
    write_mmproj(folder / "Other.MMPROJ-F16.gguf", models["qwen3-vl"])
    assert found(folder) is None
    assert "no images: expected one mmproj file beside model.gguf, found 2" in caplog.text
    named = image_encoder_of(
        checkpoint(folder / "model.gguf"), Precision.of("float32"), "cpu", folder / "Other.MMPROJ-F16.gguf"
    )
    assert named is not None
    assert named.files == [folder / "Other.MMPROJ-F16.gguf"]


def test_nothing_is_said_beside_a_model_of_text(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = checkpoint(folder / "model.gguf")
    object.__setattr__(file.config, "architecture", "qwen3")
    assert find_mmproj(file) is None
    assert not caplog.records


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3-vl", "v.patch_embd.weight.1"),
        ("qwen3-vl", "v.blk.1.attn_qkv.bias"),
        ("qwen3-vl", "v.deepstack.2.fc1.weight"),
        ("qwen2.5-vl", "v.blk.2.attn_k.weight"),
        ("gemma3", "v.post_ln.bias"),
        ("gemma3", "mm.soft_emb_norm.weight"),
    ],
)
def test_missing_tensors(family: str, name: str, models: dict[str, Any], tmp_path: Path) -> None:
    """The first image is refused, and text goes on."""
    write_model(tmp_path / "model.gguf", models[family])
    write_mmproj(tmp_path / "mmproj.gguf", models[family], without=name)
    encoder = found(tmp_path)
    assert encoder is not None
    missing = name.replace("attn_qkv", "attn_q")  # which would do, too
    with pytest.raises(FastinferError, match=re.escape(f"mmproj.gguf: tensor {missing!r} is missing")) as caught:
        encoder.encode(IMAGE, "")
    assert str(tmp_path) not in str(caught.value)


def test_tensors_that_cannot_be_used(models: dict[str, Any], tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", models["qwen3-vl"])
    for tensor, message in (
        (("v.blk.0.ln1.weight", np.zeros(47, np.float32)), "of 'blocks.0.norm1.weight' must have the shape [48], got"),
        (
            ("v.patch_embd.weight.1", np.zeros((48, 3, 4, 5), np.float32)),
            "tensor 'v.patch_embd.weight.1' must have the shape [48, 3, 4, 4], got [48, 3, 4, 5]",
        ),
        (("v.blk.0.ln1.weight", np.zeros(48, np.int32)), "tensor 'v.blk.0.ln1.weight' is stored as I32; supported are"),
        (("v.blk.0.ls1.weight", np.zeros(48, np.float32)), "tensor 'v.blk.0.ls1.weight' is not implemented"),
    ):
        write_mmproj(tmp_path / "mmproj.gguf", models["qwen3-vl"], other=dict([tensor]))
        encoder = found(tmp_path)
        assert encoder is not None
        with pytest.raises(FastinferError, match=re.escape(message)):
            encoder.encode(IMAGE, "")


def test_limits_of_files_that_do_not_say_them(models: dict[str, Any], tmp_path: Path) -> None:
    """They are those of the published models: the smallest image of Qwen3-VL has 256 x 256 pixels."""
    write_model(tmp_path / "model.gguf", models["qwen3-vl"])
    keys = {"clip.vision.image_min_pixels": None, "clip.vision.image_max_pixels": None}
    write_mmproj(tmp_path / "mmproj.gguf", models["qwen3-vl"], keys=keys)
    encoder = found(tmp_path)
    assert encoder is not None
    assert encoder.layout(picture(40, 40)).runs == ((256 // 8) ** 2,)
    assert encoder.layout(picture(400, 320)).runs == (400 // 8 * (320 // 8),)


def test_prefixes_with_images_are_found(folder: Path) -> None:
    llm = LLM(str(folder), device="cpu", dtype="float32", block_size=8)
    outputs = [llm.chat(chat, PARAMS) for chat in (CHAT, CHAT, [*CHAT, {"role": "user", "content": "Why?"}])]
    length = len(outputs[0].prompt_token_ids)
    assert [output.num_cached_tokens > length - 10 for output in outputs] == [False, True, True]
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids


def test_the_server_reads_images(folder: Path) -> None:
    """It says so, too, and no longer without the file."""
    file = io.BytesIO()
    IMAGE.save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    content = [{"type": "text", "text": "Look: "}, {"type": "image_url", "image_url": {"url": url}}]
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 4, "model": "toy"}

    async def ask() -> tuple[list[str], Any]:
        async with toy_client(engine=lambda: LLM(str(folder), device="cpu", dtype="float32").engine) as client:
            models = (await client.get("/v1/models")).json()["data"]
            return models[0]["input_modalities"], await client.post("/v1/chat/completions", json=body)

    expected = LLM(str(folder), device="cpu", dtype="float32").chat(CHAT, PARAMS)
    modalities, answer = asyncio.run(ask())
    assert modalities == ["text", "image"]
    assert answer.json()["choices"][0]["message"]["content"] == expected.outputs[0].text
    (folder / "mmproj.gguf").unlink()
    modalities, answer = asyncio.run(ask())
    assert modalities == ["text"]
    assert answer.status_code == 400
    assert "or a GGUF model of gemma3, qwen2vl, " in answer.json()["error"]["message"]
