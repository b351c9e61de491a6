"""Distillation of other families than Llama: what a student of their layers is, and what is refused before training."""

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_folder import write_tiny_folder

from fastinfer.distill import run
from fastinfer.distill.settings import Settings
from fastinfer.distill.student import Student
from fastinfer.errors import CheckpointFormatError, RequestError, UnsupportedModelError
from fastinfer.evaluation.perplexity import log_probabilities
from fastinfer.models import load_model
from fastinfer.utils.machine import has_bf16

pytest.importorskip("transformers")
LENGTH = 32


def distill(teacher: Path, folder: Path, **options: Any) -> None:
    """Run with a clock that ends after few steps."""
    (folder / "text.txt").write_text("tea for two and " * 8)
    settings = Settings(str(teacher), str(folder / "text.txt"), 1.0, context=LENGTH, **options)
    times = count(0.0, 2.0)
    run.distill(settings, folder, clock=lambda: next(times))


@pytest.fixture(autouse=True)
def small_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "measure_speeds", lambda *_: {})
    monkeypatch.setattr("fastinfer.distill.shards.SHARD_SECTIONS", 4)


@pytest.mark.parametrize("family", ["lfm2", "falcon-h1", "nemotron-h", "gemma4"])
def test_some_layers_are_not_dropped(family: str, tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "teacher", family)
    for options in ({"stages": (2,)}, {"student": "layers:0,1"}):
        with pytest.raises(
            UnsupportedModelError, match="those of Gemma 4 are not dropped: expected another teacher or --student"
        ):
            distill(folder, tmp_path, **options)


def test_a_student_of_another_family(tmp_path: Path) -> None:
    """Layers of Gemma 4 have different numbers of heads, which the attention loss alone asks for."""
    teacher, student = write_tiny_folder(tmp_path / "teacher"), write_tiny_folder(tmp_path / "student", "gemma4")
    distill(teacher, tmp_path, student=str(student))
    model, _ = load_model(tmp_path / "model", "float32")
    assert model.config.num_layers == 6
    with pytest.raises(UnsupportedModelError, match="whose layers have one number of heads of keys, got Gemma4"):
        distill(teacher, tmp_path / "model", student=str(student), losses=("attention",))


@pytest.mark.parametrize("family", ["llama3", "gemma2", "granite", "cohere", "qwen3-moe", "glm4-moe", "lfm2", "gemma4"])
def test_the_head_of_some_rows(family: str, tmp_path: Path) -> None:
    """It does what the model does behind its layers: soft caps, scales, and losses of routers that are not wanted."""
    student = Student.open(write_tiny_folder(tmp_path / "teacher", family), 4, is_cut=False)
    student.model.eval()
    ids = torch.arange(60, 60 + 2 * LENGTH).view(2, LENGTH)
    with torch.inference_mode():
        with torch.autocast("cpu", torch.bfloat16, enabled=has_bf16()):
            expected = student.model(ids, use_cache=False).logits
        torch.testing.assert_close(student.logits(ids), expected)
        outputs = student.outputs(ids)
        torch.testing.assert_close(student.head(outputs, outputs.last_hidden_state[1, 3:8]), expected[1, 3:8])


@pytest.mark.parametrize("family", ["qwen2-moe", "qwen3-moe-some-dense", "glm4-moe", "glm4-moe-lite"])
def test_kept_layers_with_and_without_experts(family: str, tmp_path: Path) -> None:
    """Which layers are dense is in the configuration, by lists of their numbers, every so many, or the first ones."""
    student = Student.open(write_tiny_folder(tmp_path / "teacher", family), 4, is_cut=True)
    student.model.eval()
    student.keep([1, 2, 3])
    student.keep([0, 2])
    student.save(tmp_path / "student")
    model, _ = load_model(tmp_path / "student", "float32")
    ids = list(range(60, 60 + LENGTH))
    [found] = log_probabilities(model, [ids], torch.float32)
    with torch.inference_mode():
        expected = student.logits(torch.tensor([ids]))[0].float().log_softmax(-1)
    # The student is saved in bf16.
    assert ((found - expected) * expected.exp()).sum(-1).abs().mean() < 0.02


@pytest.mark.parametrize("is_tied", [True, False])
def test_an_output_layer_that_is_the_embedding_is_saved_once(is_tied: bool, tmp_path: Path) -> None:
    sizes = {"tie_word_embeddings": is_tied}
    student = Student.open(write_tiny_folder(tmp_path / "teacher", sizes=sizes), 4, is_cut=True)
    student.save(tmp_path / "student")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("teacher", "student"))
    assert after.keys() == before.keys()
    assert ("lm_head.weight" in after) != is_tied
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor.to(torch.bfloat16), rtol=0, atol=0)


def test_lists_of_other_things_than_layers_stay(tmp_path: Path) -> None:
    student = Student.open(write_tiny_folder(tmp_path / "teacher"), 4, is_cut=True)
    student.model.config.eos_token_id = [2, 3, 4, 5]
    student.keep([1, 3])
    assert student.model.config.eos_token_id == [2, 3, 4, 5]


def test_a_student_of_another_vocabulary_of_the_same_size(tmp_path: Path) -> None:
    teacher, student = (write_tiny_folder(tmp_path / name) for name in ("teacher", "student"))
    file = student / "tokenizer.json"
    values = json.loads(file.read_text())
    vocabulary = values["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(values))
    token = min(vocabulary["a"], vocabulary["b"])
    with pytest.raises(RequestError, match=f"teacher's vocabulary, whose token {token} is b'a', got b'b'"):
        distill(teacher, tmp_path, student=str(student))


def test_what_transformers_does_not_load(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "student")
    weights = load_file(folder / "model.safetensors")
    (folder / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    with pytest.raises(UnsupportedModelError, match=r"expected a model with a tokenizer that transformers loads, got"):
        Student.open(folder, 4, is_cut=False)
    (tmp_path / "tokenizer.json").rename(folder / "tokenizer.json")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"got none for model\.layers\.0\.mlp\.up_proj\.weight"):
        Student.open(folder, 4, is_cut=False)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointFormatError, match=r"config\.json"):
        Student.open(folder, 4, is_cut=False)
