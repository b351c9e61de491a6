"""fastinfer through its Python interface, including sampling and detokenisation."""

from clock import now

import fastinfer
from fastinfer import LLM, SamplingParams
from fastinfer.utils.torch_threads import set_num_threads


class Fastinfer:
    def __init__(self, model: str, threads: int, max_tokens: int, max_requests: int, dtype: str = "auto") -> None:
        set_num_threads(threads)
        self._llm = LLM(model, dtype=dtype, enable_prefix_caching=False)  # off in all engines

    @staticmethod
    def version() -> str:
        return fastinfer.__version__

    def generate(self, prompts: list[list[int]], new_tokens: int) -> tuple[float | None, list[list[int]]]:
        """Return the time of the first token (only for a single prompt) and the new tokens of every prompt."""
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        if len(prompts) > 1:
            outputs = self._llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
            return None, [output.outputs[0].token_ids for output in outputs]
        outputs = self._llm.stream_outputs({"prompt_token_ids": prompts[0]}, params)
        output = next(outputs)
        first = now()
        for later in outputs:
            output = later
        return first, [output.outputs[0].token_ids]
