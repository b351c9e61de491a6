"""fastinfer: hand-written LLM inference kernels for PyTorch, and the small engine that runs real models on them.

>>> from fastinfer import LLM, SamplingParams
>>> llm = LLM()
>>> [output] = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8))
>>> output.outputs[0].text
' Paris...'

The operators alone are in :mod:`fastinfer.ops`; C++ projects find the kernels with :func:`fastinfer.get_include`.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastinfer.async_engine import AsyncEngine, Health, OutputStream
    from fastinfer.cpp import get_cmake_dir, get_include, get_library
    from fastinfer.errors import (
        AdapterError,
        FastinferError,
        ModelNotFoundError,
        QueueFullError,
        RequestError,
        UnavailableError,
        UnsupportedModelError,
    )
    from fastinfer.llm import LLM, generate
    from fastinfer.outputs import (
        CompletionOutput,
        Logprob,
        PrefillOutput,
        RequestMetrics,
        RequestOutput,
        ScoreOutput,
    )
    from fastinfer.prompt_schema import PromptModule, PromptParameter, PromptSchema, PromptUnion
    from fastinfer.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
    from fastinfer.structured_output import StructuredOutputsParams
    from fastinfer.version import __version__

__all__ = [
    "LLM",
    "AdapterError",
    "AsyncEngine",
    "BeamSearchParams",
    "CompletionOutput",
    "FastinferError",
    "Health",
    "Logprob",
    "ModelNotFoundError",
    "OutputStream",
    "PrefillOutput",
    "PromptModule",
    "PromptParameter",
    "PromptSchema",
    "PromptUnion",
    "QueueFullError",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoreOutput",
    "StructuredOutputsParams",
    "UnavailableError",
    "UnsupportedModelError",
    "__version__",
    "generate",
    "get_cmake_dir",
    "get_include",
    "get_library",
]

# Resolved on first use: `fastinfer --help` and `fastinfer pull` need neither torch (1.5 s) nor the compiled library.
_HOMES = {
    "async_engine": ["AsyncEngine", "Health", "OutputStream"],
    "cpp": ["get_cmake_dir", "get_include", "get_library"],
    "errors": [
        "AdapterError",
        "FastinferError",
        "ModelNotFoundError",
        "QueueFullError",
        "RequestError",
        "UnavailableError",
        "UnsupportedModelError",
    ],
    "llm": ["LLM", "generate"],
    "outputs": ["CompletionOutput", "Logprob", "PrefillOutput", "RequestMetrics", "RequestOutput", "ScoreOutput"],
    "prompt_schema": ["PromptModule", "PromptParameter", "PromptSchema", "PromptUnion"],
    "sampling_params": ["BeamSearchParams", "RequestOutputKind", "SamplingParams"],
    "structured_output": ["StructuredOutputsParams"],
    "version": ["__version__"],
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'fastinfer' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"fastinfer.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
