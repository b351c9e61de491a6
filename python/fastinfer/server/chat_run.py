"""A chat in the engine, for the three interfaces that have chats."""

import asyncio
from dataclasses import dataclass, replace

from starlette.requests import Request

from fastinfer.async_engine import AsyncEngine
from fastinfer.outputs import RequestOutput
from fastinfer.sampling_params import SamplingParams
from fastinfer.server.chat_choice import ChatChoice
from fastinfer.server.chat_prompt import chat_prompt
from fastinfer.server.disconnect import unless_gone
from fastinfer.server.errors import APIError
from fastinfer.server.generation import Stream, cache_salt, check_length, finish_all, request_options, start
from fastinfer.server.output_plan import OutputPlan, plan_output
from fastinfer.server.params import check_streaming, sampling_params
from fastinfer.server.protocol.chat import ChatRequest, NamedToolChoice
from fastinfer.server.state import ServerState, server_of


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


async def start_chat(request: Request, body: ChatRequest, prompt_field: str = "messages") -> ChatRun:
    """Check and queue a chat.

    Args:
        request: the HTTP request, for its tenant and its time limit.
        body: the chat.
        prompt_field: name of the field with the conversation, for errors.

    Raises:
        APIError, FastinferError, UnavailableError: the request is refused.
    """
    server = server_of(request)
    engine, model, adapter = server.model(body.model)
    check_streaming(body)
    params = chat_params(body, engine)
    prompt = await chat_prompt(engine, body, cache_salt(request, body))
    check_length(engine, prompt, params, prompt_field)
    plan = plan_output(body, engine, prompt)
    params = _apply(plan, params)
    options = request_options(request, server, adapter, body.priority)
    [stream] = await start(engine, [prompt], params, options)
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


def _apply(plan: OutputPlan, params: SamplingParams) -> SamplingParams:
    """Return the sampling parameters with what a plan needs.

    Raises:
        APIError: the request constrains the text and forces tool calls at the same time.
    """
    if plan.make_parser is not None:  # the marks of reasoning and tool calls may be control tokens
        params = replace(params, skip_special_tokens=False)
    if plan.constraint is None:
        return params
    if params.structured_outputs is not None:
        raise APIError(400, "tool_choice and a format of the text exclude each other", param="tool_choice")
    return replace(params, structured_outputs=plan.constraint)
