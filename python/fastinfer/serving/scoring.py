"""Log-likelihoods of texts, from the log-probabilities of a prompt's tokens."""

import math
from dataclasses import replace

from fastinfer.engine.engine import Engine
from fastinfer.errors import RequestError
from fastinfer.outputs import RequestOutput, ScoreOutput
from fastinfer.sampling_params import RequestOutputKind, SamplingParams
from fastinfer.serving.prompt import PreparedPrompt, Prompt, prepare

# Scoring needs only the log-probabilities of the prompt; the one generated token is discarded.
SCORE_PARAMS = SamplingParams(
    temperature=0.0, max_tokens=1, prompt_logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY
)

# A prompt, or a pair (context, continuation).
Scorable = Prompt | tuple[Prompt, Prompt]


def prepare_score(engine: Engine, item: Scorable) -> tuple[PreparedPrompt, int]:
    """Return the whole prompt and the position of the first scored token.

    Raises:
        RequestError: the item is not a prompt or a pair of prompts, or a part of a pair has no token.
    """
    if not isinstance(item, tuple):
        prompt = prepare(engine, item)
        return replace(prompt, token_ids=prompt.plain_token_ids), 1
    if len(item) != 2:
        raise RequestError(f"prompts must be prompts or pairs (context, continuation), got a tuple of {len(item)}")
    context, continuation = prepare(engine, item[0]), prepare(engine, item[1], add_special_tokens=False)
    for name, part in (("context", context), ("continuation", continuation)):
        if not part.token_ids:
            raise RequestError(f"{name} must have at least 1 token, got 0")
    joined = replace(context, text=None, token_ids=context.plain_token_ids + continuation.plain_token_ids)
    return joined, len(context.token_ids)


def score_of(output: RequestOutput, start: int) -> ScoreOutput:
    """Add up the log-probabilities of the prompt's tokens from position ``start`` on.

    Raises:
        RuntimeError: the request failed.
    """
    completion = output.outputs[0]
    if completion.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"the request failed: {completion.stop_reason or completion.finish_reason}")
    assert output.prompt_logprobs is not None
    logprobs = []
    for token_id, entries in zip(output.prompt_token_ids[start:], output.prompt_logprobs[start:], strict=True):
        assert entries is not None
        logprobs.append(entries[token_id].logprob)
    return ScoreOutput(output.prompt_token_ids, math.fsum(logprobs), len(logprobs))
