"""Engines with tensor parallelism: steps without graphs, sleep, and refusals."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from support.divided import GREEDY, LIMITS, texts
from support.image_models import picture, save_model
from support.tiny_folder import write_tiny_folder

from fastinfer import LLM
from fastinfer.errors import FastinferError, RequestError, UnavailableError
from fastinfer.models import Model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("llama3"), "llama3")


@pytest.fixture(scope="module")
def whole(folder: Path) -> LLM:
    return LLM(str(folder), **LIMITS)


def test_steps_operator_by_operator(folder: Path, whole: LLM) -> None:
    eager = LLM(str(folder), tensor_parallel_size=2, enforce_eager=True, **LIMITS)
    assert texts(eager, GREEDY) == texts(whole, GREEDY)


@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
def test_a_model_with_images_reads_text_alone(kind: str, tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3-vl")
    divided = LLM(str(tmp_path), **{f"{kind}_parallel_size": 2}, **LIMITS)
    chat = [{"role": "user", "content": "What is it?"}]
    assert divided.chat(chat, GREEDY).outputs[0].text == LLM(str(tmp_path), **LIMITS).chat(chat, GREEDY).outputs[0].text
    with pytest.raises(RequestError, match=r"expected text alone, .* neither tensor nor pipeline parallelism, got one"):
        divided.chat([{"role": "user", "content": [{"type": "image", "image": picture(9, 5)}]}])


@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
def test_sleep(folder: Path, whole: LLM, kind: str, tmp_path: Path) -> None:
    """At level 2 all ranks load the files again, once there are any that rank 0 can load."""
    path = tmp_path / "model"
    shutil.copytree(folder, path)
    divided = LLM(str(path), **{f"{kind}_parallel_size": 2}, **LIMITS)
    divided.sleep()
    assert divided.engine.is_sleeping
    divided.wake_up()
    assert texts(divided, GREEDY) == texts(whole, GREEDY)
    divided.sleep(2)
    path.rename(tmp_path / "old")
    with pytest.raises(FastinferError):
        divided.wake_up()
    assert divided.engine.is_sleeping
    write_tiny_folder(path, "llama3", {"seed": 1})
    divided.wake_up()
    other = LLM(str(path), **LIMITS)
    assert texts(divided, GREEDY) == texts(other, GREEDY) != texts(whole, GREEDY)


def test_an_engine_is_lost_once_another_rank_cannot_load_its_part(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(folder, path)
    divided = LLM(str(path), tensor_parallel_size=2, **LIMITS)
    divided.sleep(2)
    load = divided.engine._sleep_mode._load_models
    assert load is not None

    def load_last() -> list[Model]:
        """Load rank 0's part, and leave nothing for the other rank."""
        models = load()
        path.rename(tmp_path / "old")
        return models

    divided.engine._sleep_mode._load_models = load_last
    lost = r"^tensor parallelism ended: rank 1: .*model"
    with pytest.raises(RuntimeError, match=lost):
        divided.wake_up()
    (tmp_path / "old").rename(path)
    with pytest.raises(RuntimeError, match=lost):
        divided.wake_up()
    with pytest.raises(UnavailableError, match=lost):
        texts(divided, GREEDY)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be an integer in 1..64, got 0"),
        ({"tensor_parallel_size": 5}, "tensor_parallel_size must be at most 4 for this model"),
    ],
)
def test_what_is_not_supported_is_refused(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(FastinferError, match=message):
        LLM(str(folder), **{"tensor_parallel_size": 2, **options})
