"""Fields of a request as the engine's parameters."""

import dataclasses
from typing import Any

from fastinfer.async_engine import AsyncEngine
from fastinfer.sampling_params import MAX_COMPLETIONS, RequestOutputKind, SamplingParams
from fastinfer.server.errors import APIError
from fastinfer.server.protocol.sampling import JSONSchemaFormat, SamplingFields
from fastinfer.structured_output import StructuredOutputsParams
from fastinfer.utils.checks import INT64_MAX, check_int

# Fields that have the same name and meaning in SamplingParams.
_SAME = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("n", "seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens"),
    *("allowed_token_ids", "bad_words", "skip_special_tokens", "truncate_prompt_tokens", "prompt_logprobs"),
)
STREAMED = RequestOutputKind.DELTA
AT_ONCE = RequestOutputKind.FINAL_ONLY


def sampling_params(request: SamplingFields, defaults: SamplingParams, **fields: Any) -> SamplingParams:
    """Return the engine's parameters of a request.

    Args:
        request: the request; a field that is null or absent takes the default.
        defaults: the model's own parameters, from its ``generation_config.json``.
        fields: further parameters, which each interface has under other names: ``max_tokens`` and ``logprobs``.

    Raises:
        APIError: two fields contradict each other.
        RequestError: a field is out of range.
    """
    given = {name: value for name in _SAME if (value := getattr(request, name)) is not None}
    if request.seed is not None:
        check_int("seed", request.seed, -INT64_MAX - 1, INT64_MAX)
        given["seed"] = request.seed & INT64_MAX  # the engine has no negative ones
    if request.logit_bias is not None:
        given["logit_bias"] = {_token_id(key): value for key, value in request.logit_bias.items()}
    return dataclasses.replace(
        defaults,
        structured_outputs=structured_outputs(request),
        output_kind=STREAMED if request.stream else AT_ONCE,
        **given,
        **fields,
    )


def structured_outputs(request: SamplingFields) -> StructuredOutputsParams | None:
    """Return the constraint on a request's text, from ``response_format`` or ``structured_outputs``.

    Raises:
        APIError: both are given.
        RequestError: the constraint is not valid.
    """
    ours = request.structured_outputs
    form = request.response_format
    if form is not None and form.type == "text":
        form = None
    if ours is not None and form is not None:
        raise APIError(400, "structured_outputs and response_format exclude each other", param="structured_outputs")
    if ours is not None:
        return StructuredOutputsParams(**ours.model_dump(by_alias=True))
    if form is None:
        return None
    if isinstance(form, JSONSchemaFormat):
        return StructuredOutputsParams(json=form.json_schema.schema_)
    return StructuredOutputsParams(json_object=True)


def check_options(request: SamplingFields, engine: AsyncEngine) -> None:
    """Check what is not in the sampling parameters, or has other limits there.

    Raises:
        APIError: options of a stream come without one.
        RequestError: there are more completions than may run at once.
    """
    if request.n is not None:
        check_int("n", request.n, 1, min(MAX_COMPLETIONS, engine.config.max_num_seqs))
    if not request.stream and request.stream_options is not None:
        raise APIError(400, "stream_options needs stream to be true", param="stream_options")


def _token_id(key: str) -> int:
    if not key.isascii() or not key.isdecimal() or len(key) > 10:
        raise APIError(400, f"logit_bias must have token ids as keys, got {key!r}", param="logit_bias")
    return int(key)
