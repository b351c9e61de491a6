"""A chat in the engine, for the three interfaces that have chats."""

import asyncio
from dataclasses import dataclass

from starlette.requests import Request

from fastinfer.async_engine import AsyncEngine
from fastinfer.outputs import RequestOutput
from fastinfer.sampling_params import SamplingParams
from fastinfer.server.caching import question_of
from fastinfer.server.chat_choice import ChatChoice
from fastinfer.server.chat_prompt import chat_prompt
from fastinfer.server.disconnect import unless_gone
from fastinfer.server.errors import APIError
from fastinfer.server.generation import (
    Stream,
    cache_salt,
    check_length,
    compile_constraint,
    finish_all,
    request_options,
    start,
)
from fastinfer.server.output_plan import OutputPlan, plan_output
from fastinfer.server.params import check_options, sampling_params
from fastinfer.server.protocol.chat import ChatRequest, NamedToolChoice
from fastinfer.server.state import ServerState, server_of
from fastinfer.server.tool_checks import check_tools, compile_tools


@dataclass(frozen=True, eq=False)
class ChatRun:
    """A queued chat.

    Attributes:
        server: the server.
        engine: the engine.
        body: the request, as a request of ``/v1/chat/completions``.
        model: the model's name in the answer.
        params: the sampling parameters.
        plan: how the output is read.
        stream: the outputs.
    """

    server: ServerState
    engine: AsyncEngine
    body: ChatRequest
    model: str
    params: SamplingParams
    plan: OutputPlan
    stream: Stream

    def choice(self) -> ChatChoice:
        """Return the reader of one completion."""
        return ChatChoice(
            self.plan.make_parser and self.plan.make_parser(),
            is_named=isinstance(self.body.tool_choice, NamedToolChoice),
            is_parallel=self.body.parallel_tool_calls is not False,
            keeps_reasoning=self.body.include_reasoning is not False,
        )

    async def num_tokens(self, text: str) -> int:
        """Return the number of tokens of a part of the answer."""
        if not text:
            return 0
        return len(await asyncio.to_thread(self.engine.tokenizer.encode, text, add_special_tokens=False))

    async def output(self, request: Request) -> RequestOutput:
        """Return the final output of a request that does not stream.

        Raises:
            APIError: the request has failed.
            ClientGoneError: the client has gone.
        """
        [output] = await unless_gone(request, finish_all(self.server, [self.stream], self.params))
        return output


async def start_chat(request: Request, body: ChatRequest) -> ChatRun:
    """Check and queue a chat.

    Args:
        request: the HTTP request, for its tenant and its time limit.
        body: the chat.

    Raises:
        APIError, FastinferError, UnavailableError: the request is refused.
    """
    server = server_of(request)
    engine, model, adapter = server.model(body.model)
    check_options(body, engine)
    if body.tools:  # which may be large
        await asyncio.to_thread(check_tools, body)
    params = chat_params(body, engine)
    prompt = await chat_prompt(server, body, cache_salt(request, body))
    check_length(engine, prompt, params)
    plan = await _plan(server, body, params, prompt.text or "")
    text, params = params.structured_outputs, plan.params
    if text is not None and params.structured_outputs != text:
        # Alone, because an error of the whole grammar, of which it is a part, would not name it.
        await compile_constraint(engine, text)
    if plan.constrains_calls and params.structured_outputs is not None:
        await compile_tools(engine, body, params.structured_outputs)
    options = request_options(request, server, adapter, body.priority)
    question = await question_of(request, engine, body, params, adapter)
    [stream] = await start(request, engine, [prompt], params, options, question)
    return ChatRun(server, engine, body, model, params, plan, stream)


def chat_params(body: ChatRequest, engine: AsyncEngine) -> SamplingParams:
    """Return the sampling parameters of a chat. Without a limit the answer may be as long as the context allows.

    Raises:
        APIError: two fields contradict each other.
        RequestError: a field is out of range.
    """
    if body.top_logprobs is not None and not body.logprobs:
        raise APIError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return sampling_params(body, engine.default_params, max_tokens=max_tokens, logprobs=logprobs)


async def _plan(server: ServerState, body: ChatRequest, params: SamplingParams, prompt: str) -> OutputPlan:
    """Plan the output, beside the event loop if there are schemas, which may be large."""
    arguments = (body, params, server.output_format, prompt, server.host.engine.tokenizer)
    if body.tools or params.structured_outputs is not None:
        return await asyncio.to_thread(plan_output, *arguments)
    return plan_output(*arguments)
