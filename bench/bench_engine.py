"""Speed of the engine on a GPU, with random models that have the shapes of Llama 3.2 1B and Llama 3.1 8B.

The weights are drawn on the GPU, so there is no file. Requests have random tokens as prompts and decode greedily.
bench_decode_step.py measures the kernels of the same steps without the engine.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastinfer.benchmarks.report import write_json
from fastinfer.engine.config import EngineConfig
from fastinfer.engine.engine import Engine
from fastinfer.formats.unpacked import Dense, Int4, Unpacked
from fastinfer.models.config import ModelConfig, Precision
from fastinfer.models.loader import load_decoder
from fastinfer.sampling_params import SamplingParams
from fastinfer.utils.device import resolve_device

GROUP = 128
REPEATS = 3
COMMON: dict[str, Any] = {
    "architecture": "llama",
    "num_kv_heads": 8,
    "num_heads": 32,
    "vocab_size": 128256,
    "max_position": 8192,
    "norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
MODELS = {
    "1b": ModelConfig(hidden_size=2048, intermediate_size=8192, num_layers=16, head_dim=64, rotary_dim=64, **COMMON),
    "8b": ModelConfig(hidden_size=4096, intermediate_size=14336, num_layers=32, head_dim=128, rotary_dim=128, **COMMON),
}
SMALL = ModelConfig(
    hidden_size=256, intermediate_size=256, num_layers=1, head_dim=64, rotary_dim=64,
    **COMMON | {"num_heads": 4, "num_kv_heads": 2, "vocab_size": 512},
)  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """Numbers of requests that decode at once, from prompts of ``prompt_tokens``; and prompts of a request alone."""

    batches: tuple[int, ...] = (1, 16, 64)
    prompt_tokens: int = 128
    warm_up_steps: int = 8
    steps: int = 64
    prefills: tuple[int, ...] = (512, 2048)

    @property
    def max_tokens(self) -> int:
        return self.warm_up_steps + self.steps + 32  # more than are timed, as requests do not start in one step


SMALL_WORKLOAD = Workload(batches=(1, 3), prompt_tokens=5, warm_up_steps=2, steps=3, prefills=(10, 24))


class RandomWeights:
    """A checkpoint of random weights on the device."""

    path = Path("random")
    weight_bytes = 0

    def __init__(self, config: ModelConfig, weights: str, device: str) -> None:
        self.config, self._weights, self._device = config, weights, device

    def __contains__(self, name: str) -> bool:
        return name == "lm_head" and self.config.hidden_size > 2048  # the small model's is the embedding

    def linear(self, name: str, out_features: int, in_features: int) -> Unpacked:
        if self._weights == "int4" and name.startswith("layers."):
            q = torch.randint(0, 16, (out_features, in_features), dtype=torch.uint8, device=self._device)
            scale = in_features**-0.5 / 4
            scales = torch.full((out_features, in_features // GROUP), scale, dtype=torch.float16, device=self._device)
            return Int4(q, scales)
        values = torch.empty(out_features, in_features, dtype=torch.bfloat16, device=self._device)
        return Dense(values.normal_(std=in_features**-0.5))

    def parts(self, name: str, out_features: int, in_features: int) -> Iterator[Unpacked]:
        yield self.linear(name, out_features, in_features)

    def vector(self, name: str, size: int) -> Tensor:
        return torch.ones(size, device=self._device)

    def draft_tokens(self) -> None:
        return None

    def layout(self, layer: int) -> str:
        return self._weights

    def unread(self) -> list[str]:
        return []

    def release(self) -> None:
        pass


class Words:
    """A tokenizer whose tokens are all the same word."""

    eos_ids: frozenset[int] = frozenset()
    max_token_length = 5

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def token_bytes(self, token_id: int, skip_special_tokens: bool = True) -> bytes:
        return b"word "

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "word " * len(ids)


def make_engine(config: ModelConfig, weights: str, work: Workload) -> Engine:
    device = resolve_device("cuda")
    with torch.cuda.device(device):
        model = load_decoder(RandomWeights(config, weights, device), Precision.of("auto", "cuda"), None, device)
    tokens = max(work.batches) * (work.prompt_tokens + work.max_tokens + 32) + max(work.prefills) + 32
    limits: dict[str, Any] = {"max_num_seqs": max(work.batches), "max_num_batched_tokens": max(work.prefills)}
    limits |= {"block_size": 32, "num_kv_blocks": tokens // 32 + 1, "enable_prefix_caching": False}
    return Engine(model, Words(config.vocab_size), EngineConfig(device=device, **limits))  # type: ignore[arg-type]


def prompt(tokens: int, vocab: int) -> list[int]:
    return [random.randrange(vocab) for _ in range(tokens)]


def decode(engine: Engine, batch: int, work: Workload) -> list[float]:
    """Return the seconds per step of this many requests, all of which decode."""
    samples = []
    for _ in range(REPEATS):
        params = SamplingParams(temperature=0.0, max_tokens=work.max_tokens, ignore_eos=True)
        ids = [engine.add_request(prompt(work.prompt_tokens, engine.vocab_size), params) for _ in range(batch)]
        started: set[str] = set()
        while len(started) < batch:
            started |= {output.request_id for output in engine.step()}
        for _ in range(work.warm_up_steps):
            engine.step()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(work.steps):
            engine.step()
        torch.cuda.synchronize()
        samples.append((time.perf_counter() - begin) / work.steps)
        for name in ids:
            engine.abort(name)
        engine.step()
    return samples


def prefill(engine: Engine, tokens: int) -> list[float]:
    """Return the seconds until the first token of a request without others."""
    samples = []
    for _ in range(REPEATS + 1):
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        engine.add_request(prompt(tokens, engine.vocab_size), params)
        while not any(output.finished for output in engine.step()):
            pass
        samples.append(time.perf_counter() - begin)
    return samples[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), required=True)
    parser.add_argument("--weights", choices=["bf16", "int4"], required=True, help="of the layers")
    parser.add_argument("--out", type=Path, help="folder of the JSON file")
    parser.add_argument("--rehearse", action="store_true", help="a small model: tests the code, measures nothing")
    args = parser.parse_args()
    random.seed(0)
    torch.manual_seed(0)
    begin = time.perf_counter()
    work = SMALL_WORKLOAD if args.rehearse else Workload()
    engine = make_engine(SMALL if args.rehearse else MODELS[args.model], args.weights, work)
    print(f"drawn, packed and captured in {time.perf_counter() - begin:.1f} s", flush=True)
    found: dict[str, Any] = {"model": args.model, "weights": args.weights, "seconds": {}}

    def measure(label: str, tokens: int, run: Callable[[], list[float]]) -> None:
        found["seconds"][label] = samples = run()
        seconds = statistics.median(samples)
        print(f"{label:<24} {seconds * 1e3:>8.2f} ms {tokens / seconds:>10,.0f} tokens/s", flush=True)
        found["eager_steps"] = engine.stats().num_eager_steps
        if args.out is not None:  # after each, as the time may run out
            write_json(args.out / f"engine_{args.model}_{args.weights}.json", found)

    for batch in work.batches:
        measure(f"decode, batch {batch}", batch, lambda batch=batch: decode(engine, batch, work))
    for tokens in work.prefills:
        measure(f"prefill of {tokens}", tokens, lambda tokens=tokens: prefill(engine, tokens))
    print(f"steps without a graph: {found['eager_steps']}")


if __name__ == "__main__":
    main()
