"""Requests to engines whose model is divided among processes."""

from typing import Any

from fastinfer import LLM, SamplingParams

# Long prompts are computed in chunks of 24 tokens, and the last one repeats the beginning of the first.
PROMPTS = [{"prompt_token_ids": ids} for ids in ([*range(3, 60)], [7, 8, 9], [*range(90, 200)], [*range(3, 40), 5])]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, logprobs=3, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, temperature=0.9, seed=11, top_p=0.9, logprobs=2, ignore_eos=True, n=2)
LONG = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
LIMITS: dict[str, Any] = {"kv_cache_memory": 2**22, "max_num_batched_tokens": 24, "block_size": 8}


def texts(llm: LLM, params: SamplingParams) -> list[Any]:
    """Tokens and log-probabilities of all completions."""
    outputs = llm.generate(PROMPTS, params)
    return [(part.token_ids, part.logprobs) for output in outputs for part in output.outputs]
