"""Ways to compute the same requests, whose results must not differ by a bit."""

from typing import Any

from fastinfer.engine.engine import Engine
from fastinfer.sampling_params import SamplingParams
from support.toy import VOCAB_SIZE, always_speculate, check_blocks, drain

PROMPTS = [[(5 * i + 3 * j) % VOCAB_SIZE for j in range(length)] for i, length in enumerate((1, 6, 70, 13, 36, 17))]
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3)


def answers(engine: Engine, params: SamplingParams = PARAMS) -> list[Any]:
    """Tokens with all log-probabilities, of every prompt's completions, which must be the same."""
    ids = [engine.add_request(prompt, params) for prompt in PROMPTS]
    outputs = drain(engine)
    check_blocks(engine)
    found = [[(c.token_ids, c.logprobs) for c in outputs[i].outputs] for i in ids]
    assert all(each == completions[0] for completions in found for each in completions)
    return [completions[0] for completions in found]


def twice(engine: Engine) -> list[Any]:
    answers(engine)
    found = answers(engine)
    assert engine.stats().num_hit_tokens > 100
    return found


def preempted(engine: Engine) -> list[Any]:
    found = answers(engine)
    assert engine.stats().num_preemptions > 0
    return found


def with_drafts(engine: Engine) -> list[Any]:
    found = answers(always_speculate(engine))
    assert engine.stats().num_drafted_tokens > 0
    return found
