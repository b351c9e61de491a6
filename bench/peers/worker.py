"""Process of one engine: ``python worker.py ENGINE``, run by the interpreter that has the engine installed.

It reads one JSON object per line and answers each with one. The first one has the settings, answered when the model is
loaded; the others are turns. It needs only the standard library and the engine's own package.
"""

import importlib
import json
import os
import sys
import time
from typing import Any

from clock import now

# Module and class of each engine, and its arguments in addition to the settings.
ENGINES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "fastinfer": ("fastinfer_engine", "Fastinfer", {}),
    "fastinfer_bf16": ("fastinfer_engine", "Fastinfer", {"dtype": "bfloat16"}),
    "llama_cpp": ("llama_cpp_engine", "LlamaCpp", {}),
    "llama_cpp_q4_0": ("llama_cpp_engine", "LlamaCpp", {}),
    "openvino": ("openvino_engine", "OpenVino", {}),
    "transformers_bf16": ("transformers_engine", "Transformers", {"dtype": "bfloat16"}),
    "transformers_fp32": ("transformers_engine", "Transformers", {"dtype": "float32"}),
}


def peak_memory() -> int:
    """Return the peak memory of this process in bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps the output of libraries out of the answers

    def answer(**message: Any) -> None:
        print(json.dumps(message), file=answers, flush=True)

    module, name, options = ENGINES[sys.argv[1]]
    settings = json.loads(sys.stdin.readline())
    start = time.perf_counter()
    try:
        engine_class = getattr(importlib.import_module(module), name)
    except ImportError as error:
        answer(error=f"not installed: {error}")
        return
    imported = time.perf_counter()
    engine = engine_class(**settings, **options)
    answer(version=engine.version(), import_s=imported - start, load_s=time.perf_counter() - imported)
    for line in sys.stdin:
        start = now()
        first_token, tokens = engine.generate(**json.loads(line))
        total_s = now() - start
        first_token_s = None if first_token is None else first_token - start
        answer(first_token_s=first_token_s, total_s=total_s, tokens=tokens, peak_memory=peak_memory())


if __name__ == "__main__":
    main()
