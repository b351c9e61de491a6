"""An LLM without a model: it streams given pieces, one token each, and remembers what it was asked."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fastinfer.outputs import CompletionOutput, RequestMetrics, RequestOutput
from fastinfer.sampling_params import SamplingParams


class FakeLLM:
    """Takes the arguments of LLM; the class attributes say what it answers."""

    pieces: tuple[str, ...] = ("The ", "sky ", "is ", "blue.")
    chat_template: str | None = "a template"
    finish_reason = "length"
    stop_reason: str | None = None
    default_params = SamplingParams(temperature=0.7, top_p=0.95)
    before_piece: Callable[[int], None] = staticmethod(lambda index: None)

    def __init__(self, model: str, *, dtype: str = "auto", **options: Any) -> None:
        self.model, self.dtype, self.options = model, dtype, options
        self.tokenizer = SimpleNamespace(chat_template=self.chat_template)
        self.engine = SimpleNamespace(
            max_model_len=options.get("max_model_len", 2048),
            config=SimpleNamespace(devices=frozenset([options.get("device", "auto")])),
        )
        self.asked: list[tuple[str, Any, SamplingParams]] = []  # method, prompt or messages, parameters
        self.asked_adapters: list[str | None] = []
        self.adapters: dict[str, Path] = {}  # the loaded ones
        self.num_closed = 0

    def load_adapter(self, name: str, path: str | Path) -> None:
        self.adapters[name] = Path(path)

    def stream_outputs(
        self, prompt: Any, params: SamplingParams, *, adapter: str | None = None
    ) -> Iterator[RequestOutput]:
        self.asked_adapters.append(adapter)
        self.asked.append(("stream_outputs", prompt, params))
        return self._run(prompt["prompt_token_ids"] if isinstance(prompt, dict) else [1, 2, 3])

    def stream_chat(
        self, messages: list[dict[str, str]], params: SamplingParams, *, adapter: str | None = None
    ) -> Iterator[RequestOutput]:
        self.asked_adapters.append(adapter)
        self.asked.append(("stream_chat", list(messages), params))
        return self._run([1, 2, 3])

    def generate(self, prompts: list[Any], params: SamplingParams) -> list[RequestOutput]:
        self.asked.append(("generate", prompts, params))
        return [list(self._run(prompt["prompt_token_ids"]))[-1] for prompt in prompts]

    def _run(self, prompt_token_ids: list[int]) -> Iterator[RequestOutput]:
        arrival_time = time.perf_counter()
        first_token_time = None
        try:
            for index, piece in enumerate(self.pieces):
                self.before_piece(index)
                now = time.perf_counter()
                first_token_time = first_token_time or now
                finished = index == len(self.pieces) - 1
                yield RequestOutput(
                    request_id="0",
                    prompt=None,
                    prompt_token_ids=prompt_token_ids,
                    outputs=[
                        CompletionOutput(
                            index=0,
                            text="".join(self.pieces[: index + 1]),
                            token_ids=list(range(index + 1)),
                            finish_reason=self.finish_reason if finished else None,
                            stop_reason=self.stop_reason if finished else None,
                            logprobs=None,
                            delta=piece,
                        )
                    ],
                    finished=finished,
                    metrics=RequestMetrics(arrival_time, arrival_time, first_token_time, now if finished else None),
                )
        finally:
            self.num_closed += 1
