"""Images in the three interfaces that have chats."""

import asyncio
import base64
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageFile
from support.image_models import picture, save_model
from support.toy_server import toy_client

from fastinfer import LLM, SamplingParams
from fastinfer.models.image_encoder import ImageEncoder

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
PICTURE = picture(37, 21, 1)
GREEDY = {"temperature": 0, "max_tokens": 12, "model": "toy"}


def encoded(image: Image.Image, kind: str = "PNG") -> str:
    file = io.BytesIO()
    image.save(file, kind)
    return base64.b64encode(file.getvalue()).decode()


def url(image: Image.Image) -> str:
    return f"data:image/png;base64,{encoded(image)}"


def chat(*urls: str) -> dict[str, Any]:
    images = [{"type": "image_url", "image_url": {"url": each, "detail": "low"}} for each in urls]
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "Look: "}, *images]}], **GREEDY}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3-vl")
    save_model(path, "qwen3-vl")
    return path


def load(folder: Path) -> LLM:
    return LLM(str(folder), dtype="float32", device="cpu")


def post(folder: Path, *requests: tuple[str, dict[str, Any]], **settings: Any) -> list[Any]:
    """Answers to one request after the other."""

    async def main() -> list[Any]:
        async with toy_client(engine=lambda: load(folder).engine, **settings) as client:
            return [await client.post(path, json=body) for path, body in requests]

    return asyncio.run(main())


def test_the_interfaces_give_the_text_of_the_library(folder: Path) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "Look: "}, {"type": "image", "image": PICTURE}]}
    output = load(folder).chat([message], SamplingParams(temperature=0.0, max_tokens=12))
    source = {"type": "base64", "media_type": "image/png", "data": encoded(PICTURE)}
    block = [{"type": "text", "text": "Look: "}, {"type": "image", "source": source}]
    parts = [{"type": "input_text", "text": "Look: "}, {"type": "input_image", "image_url": url(PICTURE)}]
    response = {"model": "toy", "temperature": 0, "max_output_tokens": 12}
    answers = post(
        folder,
        (CHAT, chat(url(PICTURE))),
        (MESSAGES, GREEDY | {"messages": [{"role": "user", "content": block}]}),
        (RESPONSES, response | {"input": [{"role": "user", "content": parts}]}),
    )
    assert [answer.status_code for answer in answers] == [200] * 3, [answer.text for answer in answers]
    first, second, third = (answer.json() for answer in answers)
    text, length = output.outputs[0].text, len(output.prompt_token_ids)
    assert text
    assert (first["choices"][0]["message"]["content"], first["usage"]["prompt_tokens"]) == (text, length)
    assert second["content"][0]["text"] == text
    assert third["output"][0]["content"][0]["text"] == text


def broken() -> str:
    return base64.b64encode(base64.b64decode(encoded(PICTURE))[:-40]).decode()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("https://example.org/a.png", "expected a URI data:image/...;base64,..., got 'https://example.org/a.png'"),
        ("file:///etc/passwd", "expected a URI data:image/...;base64,..., got 'file:///etc/passwd'"),
        ("data:text/plain;base64,YQ==", "expected a URI data:image/...;base64,..., got"),
        ("data:image/png,abc", "expected a URI data:image/...;base64,..., got 'data:image/png,abc'"),
        ("data:image/png;base64,a$b=", "expected base64, got text that is none"),
        ("data:image/png;base64,", "expected an image of the kinds PNG, JPEG, WEBP, GIF, BMP, got a file that is none"),
        ("data:image/png;base64,YWJj", "expected an image of the kinds PNG, JPEG, WEBP, GIF, BMP, got a file"),
        (f"data:image/png;base64,{broken()}", "expected an image of the kinds PNG, JPEG, WEBP, GIF, BMP, got a file"),
        (f"data:image/tiff;base64,{encoded(PICTURE, 'TIFF')}", "expected an image of the kinds PNG, JPEG, WEBP, GIF"),
        (url(Image.new("1", (2**13, 2**13))), "expected an image of 1 to 33554432 pixels, got 8192 x 8192"),
        (url(Image.new("L", (1, 300))), "an image of 1 x 300 pixels: absolute aspect ratio must be smaller than 200"),
    ],
)
def test_errors(folder: Path, address: str, message: str) -> None:
    (answer,) = post(folder, (CHAT, chat(address)))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (400, "messages", "invalid_request_error")
    assert message in error["message"]
    assert "\n" not in error["message"]
    assert str(folder) not in error["message"]


def test_too_many_images(folder: Path) -> None:
    (answer,) = post(folder, (CHAT, chat(*[url(Image.new("L", (8, 8)))] * 65)))
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "messages: expected at most 64 images, got more"


def test_too_many_pixels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pixels of all images are counted together, and none is decoded."""

    def load(image: ImageFile.ImageFile) -> None:
        raise AssertionError("an image was decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", load)
    (answer,) = post(folder, (CHAT, chat(*[url(Image.new("1", (2**12, 2**13)))] * 3)))
    assert answer.status_code == 400
    message = "messages: expected images of at most 67108864 pixels in all, got 3 of 100663296"
    assert answer.json()["error"]["message"] == message


def test_an_encoder_that_cannot_be_loaded(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3-vl")
    (tmp_path / "preprocessor_config.json").unlink()
    image, text = post(tmp_path, (CHAT, chat(url(PICTURE))), (CHAT, chat()))
    assert image.status_code == 400
    assert image.json()["error"]["message"].startswith(f"{tmp_path.name}: images: ")
    assert str(tmp_path) not in image.text
    assert text.status_code == 200


def test_a_model_of_text_alone() -> None:
    async def main() -> Any:
        async with toy_client() as client:
            return await client.post(CHAT, json=chat(url(PICTURE)))

    answer = asyncio.run(main())
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(
        "messages: expected text alone, as images need a folder of Gemma3"
    )


def test_the_response_cache_knows_images_apart(folder: Path) -> None:
    other = PICTURE.transpose(Image.Transpose.ROTATE_180)  # with as many tokens
    bodies = [(CHAT, chat(url(image))) for image in (PICTURE, PICTURE, other)]
    answers = post(folder, *bodies, response_cache="memory")
    assert [answer.headers["x-cache"] for answer in answers] == ["miss", "hit", "miss"]


@pytest.mark.parametrize("path", [CHAT, "/tokenize", "/v1/messages/count_tokens", "/v1/responses/input_tokens"])
def test_tenants_share_no_encoded_images(path: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    encode = ImageEncoder._encode

    def watched(self: ImageEncoder, *args: Any) -> Any:
        calls.append(1)
        return encode(self, *args)

    monkeypatch.setattr(ImageEncoder, "_encode", watched)
    source = {"type": "base64", "media_type": "image/png", "data": encoded(PICTURE)}
    body: dict[str, Any] = {
        CHAT: chat(url(PICTURE)),
        "/tokenize": {"messages": chat(url(PICTURE))["messages"]},
        "/v1/messages/count_tokens": {
            "model": "toy",
            "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}],
        },
        "/v1/responses/input_tokens": {
            "input": [{"role": "user", "content": [{"type": "input_image", "image_url": url(PICTURE)}]}]
        },
    }[path]

    async def main() -> None:
        async with toy_client(engine=lambda: load(folder).engine, api_keys=("one", "two")) as client:
            for key, num_calls in (("one", 1), ("one", 1), ("two", 2), ("two", 2), ("one", 2)):
                answer = await client.post(path, json=body, headers={"X-Api-Key": key})
                assert answer.status_code == 200, answer.text
                assert len(calls) == num_calls

    asyncio.run(main())
