"""Images in the three interfaces that have chats."""

import asyncio
import base64
import io
import json
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


def test_the_model_says_that_it_reads_images(folder: Path) -> None:
    async def main() -> None:
        async with toy_client(engine=lambda: load(folder).engine) as client:
            models = (await client.get("/v1/models")).json()["data"]
            assert all(model["input_modalities"] == ["text", "image"] for model in models)

    asyncio.run(main())


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


@pytest.mark.parametrize("knows_tools", [False, True], ids=["generic", "template"])
def test_images_in_results_of_tools(knows_tools: bool, tmp_path: Path) -> None:
    """Texts and images of a result keep their order, whether or not the chat template knows tools."""
    save_model(tmp_path, "qwen3-vl")
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {}}}
    first, other = {"type": "image", "image": PICTURE}, {"type": "image", "image": picture(21, 37, 2)}
    before, after = "The result of the call of f is:\n", "\n\nPlease answer with this."
    if knows_tools:
        config = json.loads((tmp_path / "tokenizer_config.json").read_text())
        config["chat_template"] += "{{ tools | tojson if tools }}"
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        called: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
        before = after = ""
    else:
        called = {"role": "assistant", "content": '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'}
    texts = [before + "A: ", " B: ", " C", after]
    one, two, three = ({"type": "text", "text": text} for text in (texts[0], texts[1], texts[2] + texts[3]))
    result = {"role": "tool" if knows_tools else "user", "content": [one, first, two, other, three]}
    messages = [{"role": "user", "content": "Look"}, called, result]
    output = load(tmp_path).chat(messages, SamplingParams(temperature=0.0, max_tokens=12))

    def parts(kind: str, image: Any) -> list[dict[str, Any]]:
        a, b, c = ({"type": kind, "text": text} for text in ("A: ", " B: ", " C"))
        return [a, image(PICTURE), b, image(other["image"]), c]

    def source(image: Image.Image) -> dict[str, Any]:
        return {"type": "base64", "media_type": "image/png", "data": encoded(image)}

    look = {"role": "user", "content": "Look"}
    links = parts("text", lambda image: {"type": "image_url", "image_url": {"url": url(image)}})
    blocks = parts("text", lambda image: {"type": "image", "source": source(image)})
    inputs = parts("input_text", lambda image: {"type": "input_image", "image_url": url(image)})
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}
    used = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": blocks}]}
    items = [
        {"type": "function_call", "call_id": "a", "name": "f"},
        {"type": "function_call_output", "call_id": "a", "output": inputs},
    ]
    chat_messages = [look, {"role": "assistant", "tool_calls": [call]}]
    answers = post(
        tmp_path,
        (CHAT, GREEDY | {"messages": [*chat_messages, {"role": "tool", "tool_call_id": "a", "content": links}]}),
        (MESSAGES, GREEDY | {"messages": [look, use, used]}),
        (RESPONSES, {"model": "toy", "temperature": 0, "max_output_tokens": 12, "input": [look, *items]}),
    )
    assert [answer.status_code for answer in answers] == [200] * 3, [answer.text for answer in answers]
    first_answer, second, third = (answer.json() for answer in answers)
    text, length = output.outputs[0].text, len(output.prompt_token_ids)
    choice = first_answer["choices"][0]["message"]
    assert (choice["content"], first_answer["usage"]["prompt_tokens"]) == (text, length)
    usage = second["usage"]
    assert second["content"][0]["text"] == text
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == length
    assert third["output"][0]["content"][0]["text"] == text
    assert third["usage"]["input_tokens"] == length


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
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded(PICTURE)}}
    result = {"type": "tool_result", "tool_use_id": "a", "is_error": True, "content": [block]}
    bodies = [(CHAT, chat(url(PICTURE))), (MESSAGES, GREEDY | {"messages": [{"role": "user", "content": [result]}]})]

    async def main() -> list[Any]:
        async with toy_client() as client:
            return [await client.post(path, json=body) for path, body in bodies]

    for answer in asyncio.run(main()):
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert message.startswith("messages: expected text alone, as images need a folder of Gemma3")
        assert "\n" not in message


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
