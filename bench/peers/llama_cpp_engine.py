"""llama.cpp through llama-cpp-python: evaluation and greedy choice, without sampler chain and detokenisation.

``python llama_cpp_engine.py SOURCE TARGET TYPE`` writes a quantised file; TYPE is a name of llama.cpp, such as q4_k_m.
"""

import ctypes
import sys

import llama_cpp as llama
import numpy as np
from clock import now

BATCH = 2048  # largest number of tokens per call; the library processes them in micro-batches of 512


class Context:
    """KV cache for several sequences, and evaluation of tokens into it."""

    def __init__(self, model: llama.llama_model_p, threads: int, sequences: int, max_tokens: int) -> None:
        params = llama.llama_context_default_params()
        params.n_seq_max = sequences
        params.n_ctx = sequences * max_tokens
        params.n_batch = BATCH
        params.n_ubatch = 512
        params.n_threads = params.n_threads_batch = threads
        self._context = llama.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError("llama.cpp could not create a context")
        self._vocab = llama.llama_n_vocab(llama.llama_model_get_vocab(model))
        self._batch = llama.llama_batch_init(BATCH, 0, 1)

    def clear(self) -> None:
        llama.llama_memory_clear(llama.llama_get_memory(self._context), False)

    def evaluate(self, sequences: list[list[int]], position: int) -> list[int]:
        """Append tokens to each sequence and return the most likely next ones; all sequences have the same length."""
        next_tokens: list[int] = []
        per_call = max(1, BATCH // len(sequences[0]))
        for start in range(0, len(sequences), per_call):
            next_tokens += self._call(range(start, min(start + per_call, len(sequences))), sequences, position)
        return next_tokens

    def _call(self, chosen: range, sequences: list[list[int]], position: int) -> list[int]:
        batch, ends, i = self._batch, [], 0
        for sequence in chosen:
            for offset, token in enumerate(sequences[sequence]):
                batch.token[i] = token
                batch.pos[i] = position + offset
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = sequence
                batch.logits[i] = offset == len(sequences[sequence]) - 1
                i += 1
            ends.append(i - 1)
        batch.n_tokens = i
        if llama.llama_decode(self._context, batch) != 0:
            raise RuntimeError(f"llama_decode failed at {i} tokens")
        return [self._most_likely(end) for end in ends]

    def _most_likely(self, index: int) -> int:
        logits = llama.llama_get_logits_ith(self._context, index)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab,)).argmax())


class LlamaCpp:
    def __init__(self, model: str, threads: int, max_tokens: int, max_requests: int) -> None:
        llama.llama_log_set(_silent, ctypes.c_void_p(0))
        llama.llama_backend_init()
        params = llama.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = llama.llama_model_load_from_file(model.encode(), params)
        if not self._model:
            raise RuntimeError(f"llama.cpp could not load {model}")
        self._threads, self._requests = threads, max_requests
        self._one = Context(self._model, threads, 1, max_tokens)
        self._many: Context | None = None

    @staticmethod
    def version() -> str:
        return f"llama-cpp-python {llama.__version__} ({llama.llama_print_system_info().decode().strip()})"

    def generate(self, prompts: list[list[int]], new_tokens: int) -> tuple[float | None, list[list[int]]]:
        """Return the time of the first token and the new tokens of every prompt; all prompts have the same length."""
        length = len(prompts[0])
        if len(prompts) > 1 and self._many is None:  # only in the warm-up
            self._many = Context(self._model, self._threads, self._requests, 256 * -(-(length + new_tokens) // 256))
        context = self._one if len(prompts) == 1 else self._many
        assert context is not None
        context.clear()
        outputs = [context.evaluate(prompts, 0)]
        first = now()
        for position in range(length, length + new_tokens - 1):
            outputs.append(context.evaluate([[token] for token in outputs[-1]], position))
        return first, [list(tokens) for tokens in zip(*outputs, strict=True)]


@llama.llama_log_callback
def _silent(level: int, text: bytes, user_data: object) -> None:
    pass


def quantize(source: str, target: str, file_type: str) -> None:
    params = llama.llama_model_quantize_default_params()
    params.ftype = getattr(llama, f"LLAMA_FTYPE_MOSTLY_{file_type.upper()}")
    params.allow_requantize = True
    if llama.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)) != 0:
        raise RuntimeError(f"llama.cpp could not quantise {source}")


if __name__ == "__main__":
    quantize(*sys.argv[1:])
