"""``/tokenize``, ``/detokenize`` and ``/tokenizer_info``."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from fastinfer.server.chat_prompt import chat_prompt
from fastinfer.server.errors import JSON, APIError
from fastinfer.server.generation import cache_salt
from fastinfer.server.protocol.base import parse
from fastinfer.server.protocol.chat import ChatRequest
from fastinfer.server.protocol.tokens import DetokenizeRequest, TokenizeRequest
from fastinfer.server.state import server_of

router = APIRouter()


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    """Return the tokens of a text, or of a conversation as a chat would render it."""
    server = server_of(request)
    body = await parse(request, TokenizeRequest, server.config.body_timeout_s)
    engine, _, _ = server.model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise APIError(400, "prompt and messages: expected one of them", param="prompt")
    for name in body.misplaced():
        raise APIError(400, f"{name} is not for a {'conversation' if body.prompt is None else 'prompt'}", param=name)
    if body.prompt is not None:
        prompt = await engine.prepare(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    else:
        chat = ChatRequest.model_construct(
            messages=body.messages,
            tools=body.tools or None,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            chat_template_kwargs=body.chat_template_kwargs,
        )
        prompt = await chat_prompt(server, chat, cache_salt(request, chat))
    answer = {"count": len(prompt.token_ids), "max_model_len": engine.max_model_len, "tokens": prompt.token_ids}
    if body.return_token_strs:
        spelled = [engine.tokenizer.token_bytes(token_id, False) for token_id in prompt.token_ids]
        answer["token_strs"] = [token.decode(errors="replace") for token in spelled]
    return JSON(answer)


@router.post("/detokenize")
async def detokenize(request: Request) -> Response:
    """Return the text of tokens, special ones included."""
    server = server_of(request)
    body = await parse(request, DetokenizeRequest, server.config.body_timeout_s)
    engine, _, _ = server.model(body.model)
    return JSON({"prompt": await engine.detokenize(body.tokens)})


@router.get("/tokenizer_info")
async def describe_tokenizer(request: Request) -> Response:
    """Describe the tokenizer to clients that have none themselves and use the two routes above."""
    engine = server_of(request).host.engine
    tokenizer = engine.tokenizer
    return JSON(
        {
            "bos_token": tokenizer.bos_token or None,
            "eos_token": tokenizer.eos_token or None,
            "pad_token": None,
            "chat_template": tokenizer.chat_template,
            "model_max_length": engine.max_model_len,
        }
    )
