"""The offline API: a model by name or path, and text from it."""

import contextlib
import dataclasses
import functools
import itertools
import threading
from collections import deque
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from fastinfer import hub
from fastinfer.chat_template import render
from fastinfer.engine.config import EngineConfig
from fastinfer.engine.engine import Engine
from fastinfer.errors import RequestError
from fastinfer.models import load_model
from fastinfer.models.config import Precision
from fastinfer.outputs import RequestOutput
from fastinfer.sampling_params import DEFAULT_PARAMS, SamplingParams

# Text, or {"prompt": text}, or {"prompt_token_ids": [...]}.
Prompt = str | Mapping[str, Any]
Outputs = Generator[RequestOutput, None, None]


@dataclass(frozen=True)
class _Prepared:
    """A request that the engine will accept."""

    request_id: str
    prompt: str | None
    token_ids: list[int]
    params: SamplingParams


class LLM:
    """A loaded model that generates text.

    Calls from several threads are safe, and share steps: whichever thread is ahead computes for all.

    Args:
        model: a name or path that :func:`fastinfer.hub.resolve` knows.
        dtype: ``"float32"``, ``"bfloat16"``, ``"float16"``, or ``"auto"`` for the fastest of the machine.
        device: ``"cpu"``, ``"cuda"`` or ``"auto"``.
        max_model_len, max_num_seqs, max_num_batched_tokens, kv_cache_memory, block_size: see
            :class:`fastinfer.engine.engine.EngineConfig`.

    Raises:
        ModelNotFoundError: there is no such model.
        UnsupportedModelError: its architecture is not implemented.
        RequestError: a limit is out of its range, or memory does not suffice for ``max_model_len``.
    """

    def __init__(
        self,
        model: str = hub.DEFAULT_MODEL,
        *,
        dtype: str = "auto",
        device: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        kv_cache_memory: int | None = None,
        block_size: int = 32,
    ) -> None:
        _check_choice("dtype", dtype, ("auto", "float32", "bfloat16", "float16"))
        _check_choice("device", device, ("auto", "cpu", "cuda"))
        device = "cpu" if device == "auto" else device  # no model runs on CUDA yet
        config = EngineConfig(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            kv_cache_dtype=Precision.of(dtype).kv_cache_dtype,
            kv_cache_memory=kv_cache_memory,
            device=device,
        )
        loaded, self.tokenizer = load_model(hub.resolve(model), dtype, device, max_model_len)
        self.engine = Engine(loaded, self.tokenizer, config)
        self._lock = threading.Lock()  # of the engine and the inboxes
        self._inboxes: dict[str, deque[RequestOutput]] = {}
        self._abandoned: deque[str] = deque()  # ids to abort before the next step
        self._numbers = itertools.count()

    def generate(
        self,
        prompts: Prompt | list[Prompt],
        params: SamplingParams | list[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Complete the prompts, all at the same time as far as the limits allow.

        Args:
            prompts: one or many; each text, ``{"prompt": text}`` or ``{"prompt_token_ids": [...]}``.
            params: one for all, or one per prompt; by default temperature 0.7 and top_p 0.95.
            use_tqdm: show a progress bar on stderr.

        Returns:
            One finished output per prompt, in their order.

        Raises:
            RequestError: a prompt or its parameters cannot be served; nothing has been computed then.
        """
        requests = self._prepare(prompts if isinstance(prompts, list) else [prompts], params)
        return self._complete(requests, use_tqdm)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[str, None, None]:
        """Complete one prompt, piece by piece; together the pieces are the text of :meth:`generate`.

        Closing the iterator aborts the request.

        Raises:
            RequestError: the prompt cannot be served.
            RuntimeError: processing the request failed half-way.
        """
        return _pieces(self.stream_outputs(prompt, params))

    def stream_outputs(self, prompt: Prompt, params: SamplingParams | None = None) -> Outputs:
        """The cumulative output after every token; closing the iterator aborts the request.

        Raises:
            RequestError: the prompt cannot be served.
        """
        return self._run(self._prepare([prompt], params))

    def chat(self, messages: list[dict[str, Any]], params: SamplingParams | None = None) -> RequestOutput:
        """The model's answer to a conversation, such as ``[{"role": "user", "content": "Hello"}]``.

        Raises:
            RequestError: the conversation cannot be served.
            UnsupportedModelError: the model has no chat template.
        """
        return self._complete(self._prepare_chat(messages, params))[0]

    def stream_chat(self, messages: list[dict[str, Any]], params: SamplingParams | None = None) -> Outputs:
        """:meth:`chat` as :meth:`stream_outputs`."""
        return self._run(self._prepare_chat(messages, params))

    def _prepare(
        self,
        prompts: list[Prompt],
        params: SamplingParams | list[SamplingParams] | None,
        add_special_tokens: bool = True,
    ) -> list[_Prepared]:
        """Tokenise and validate, before anything runs."""
        if not isinstance(params, list):
            params = [params or DEFAULT_PARAMS] * len(prompts)
        if len(params) != len(prompts):
            raise RequestError(f"params must be one or {len(prompts)}, as many as prompts, got {len(params)}")
        requests = []
        for prompt, its_params in zip(prompts, params, strict=True):
            text, token_ids = self._tokenize(prompt, add_special_tokens)
            self.engine.validate(token_ids, its_params)
            requests.append(_Prepared(f"llm-{next(self._numbers)}", text, token_ids, its_params))
        return requests

    def _prepare_chat(self, messages: list[dict[str, Any]], params: SamplingParams | None) -> list[_Prepared]:
        tokenizer = self.tokenizer
        text = render(tokenizer.chat_template, messages, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
        # The template has written the special tokens itself.
        return self._prepare([text], params, add_special_tokens=False)

    def _tokenize(self, prompt: Prompt, add_special_tokens: bool) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            if prompt.keys() == {"prompt_token_ids"}:
                return None, prompt["prompt_token_ids"]
            if prompt.keys() == {"prompt"}:
                prompt = prompt["prompt"]
        if not isinstance(prompt, str):
            raise RequestError(
                "prompt must be a string, {'prompt': string} or {'prompt_token_ids': list}, "
                f"got {sorted(map(str, prompt)) if isinstance(prompt, Mapping) else type(prompt).__name__}"
            )
        return prompt, self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)

    def _complete(self, requests: list[_Prepared], use_tqdm: bool = False) -> list[RequestOutput]:
        finished = {}
        with tqdm(total=len(requests), unit="prompt", disable=not use_tqdm) as bar:
            for output in self._run(requests):
                if output.finished:
                    finished[output.request_id] = output
                    bar.update()
        return [finished[request.request_id] for request in requests]

    def _run(self, requests: list[_Prepared]) -> Outputs:
        """The requests' outputs as they come. Ends with the last one; an early end, of any kind, aborts the others."""
        inbox: deque[RequestOutput] = deque()
        pending = {request.request_id for request in requests}
        try:
            with self._lock:
                for request in requests:
                    self.engine.add_request(
                        request.token_ids, request.params, prompt=request.prompt, request_id=request.request_id
                    )
                    self._inboxes[request.request_id] = inbox
            while pending:
                with self._lock:
                    self._abort_abandoned()
                    # Another thread's step may have brought something meanwhile.
                    if not inbox:
                        for output in self.engine.step():
                            assert isinstance(output, RequestOutput)
                            self._inboxes[output.request_id].append(output)
                while inbox:
                    output = inbox.popleft()
                    if output.finished:
                        pending.discard(output.request_id)
                        self._inboxes.pop(output.request_id, None)
                    yield output
        finally:
            # An iterator that nobody holds any more is closed by the garbage collector, perhaps in the middle of this
            # very thread's step: waiting for the lock here could wait for ever. Whoever has it looks at the list.
            self._abandoned.extend(pending)
            if self._lock.acquire(blocking=False):
                try:
                    self._abort_abandoned()
                finally:
                    self._lock.release()

    def _abort_abandoned(self) -> None:
        """Forget the requests that nobody waits for; the caller holds the lock."""
        while self._abandoned:
            request_id = self._abandoned.popleft()
            self.engine.abort(request_id)
            self._inboxes.pop(request_id, None)


def generate(prompt: str, *, model: str = hub.DEFAULT_MODEL, **sampling: Any) -> str:
    """The completion of one prompt; the model stays loaded for the next call.

    Args:
        prompt: the text to go on from.
        model: a name or path, as for :class:`LLM`.
        sampling: fields of :class:`SamplingParams`; temperature and top_p are 0.7 and 0.95 unless given.

    >>> generate("Once upon a time", max_tokens=32, temperature=0.0)
    """
    return "".join(_loaded(model).stream(prompt, dataclasses.replace(DEFAULT_PARAMS, **sampling)))


@functools.lru_cache(maxsize=1)
def _loaded(model: str) -> LLM:
    return LLM(model)


def _pieces(outputs: Outputs) -> Generator[str, None, None]:
    with contextlib.closing(outputs):
        for output in outputs:
            completion = output.outputs[0]
            if completion.delta:
                yield completion.delta
            if completion.finish_reason == "error":
                raise RuntimeError(f"the request failed: {completion.stop_reason}")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise RequestError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
