"""Stored answers: what the engine has generated, without anything that a parser has made of it."""

import time
from collections.abc import Sequence
from typing import Any

import orjson

from fastinfer.outputs import CompletionOutput, RequestMetrics, RequestOutput


def encode(outputs: Sequence[RequestOutput]) -> bytes:
    """Return the finished outputs of a request's prompts as JSON."""
    value: bytes = orjson.dumps([_encoded(output) for output in outputs])
    return value


def decode(value: bytes, prompts: Sequence[Sequence[int]]) -> list[RequestOutput]:
    """Return the outputs that :func:`encode` was given, as outputs of a new request.

    Args:
        value: the stored answer.
        prompts: token ids of the new request's prompts.

    Raises:
        ValueError: the value is no answer to that many prompts.
    """
    try:
        return [_decoded(item, prompt) for item, prompt in zip(orjson.loads(value), prompts, strict=True)]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"a stored answer must be JSON of this version, got {error!r}") from None


def _encoded(output: RequestOutput) -> dict[str, Any]:
    completions = [completion.complete() for completion in output.outputs]
    return {
        # A prompt may have been truncated.
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": output.num_cached_tokens,
        "completions": [
            {
                "text": completion.text,
                "token_ids": completion.token_ids,
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
            }
            for completion in completions
        ],
    }


def _decoded(item: dict[str, Any], prompt: Sequence[int]) -> RequestOutput:
    completions = [
        CompletionOutput(
            index=index,
            text=completion["text"],
            token_ids=completion["token_ids"],
            finish_reason=completion["finish_reason"],
            stop_reason=completion["stop_reason"],
            logprobs=None,
            delta=completion["text"],
        )
        for index, completion in enumerate(item["completions"])
    ]
    ids = list(prompt[max(len(prompt) - item["prompt_tokens"], 0) :])
    return RequestOutput(
        request_id="",
        prompt=None,
        prompt_token_ids=ids,
        outputs=completions,
        finished=True,
        metrics=RequestMetrics(time.perf_counter(), None, None, None),
        num_cached_tokens=min(item["cached_tokens"], len(ids)),
    )
