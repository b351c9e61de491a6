"""Comparison of models on one text: size, perplexity, agreement with the first model, and speed."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from fastinfer import hub
from fastinfer.errors import RequestError
from fastinfer.evaluation.perplexity import exponential, loss, predictions
from fastinfer.evaluation.text_file import Sections, read_sections, read_text
from fastinfer.llm import LLM, kv_cache_dtype_of
from fastinfer.models import load_model, open_checkpoint, read_tokenizer
from fastinfer.models.config import Precision
from fastinfer.sampling_params import SamplingParams
from fastinfer.utils.device import resolve_device
from fastinfer.utils.finite_json import finite_json
from fastinfer.utils.table import format_table

SPEED_PROMPT, SPEED_TOKENS, SPEED_REPEATS = 32, 64, 3


@dataclass
class Result:
    """Results of one model.

    Attributes:
        model: the model's name as the user gave it.
        bytes: size of the weight files.
        perplexity: perplexity on the text.
        agreement: share of the predictions whose most likely token is also the first model's.
        divergence: mean Kullback-Leibler divergence from the first model's distribution, in nats. It and the agreement
            are those of the tokens that all models have.
        tokens_per_s: median speed of decoding one sequence; ``None`` if it was not measured.
    """

    model: str
    bytes: int
    perplexity: float
    agreement: float
    divergence: float
    tokens_per_s: float | None = None

    def row(self) -> list[str]:
        speed = "-" if self.tokens_per_s is None else f"{self.tokens_per_s:.1f}"
        return [
            self.model,
            f"{self.bytes / 2**20:.1f}",
            f"{self.perplexity:.3f}",
            f"{self.agreement:.2%}",
            f"{self.divergence:.4f}",
            speed,
        ]


HEADER = ["model", "MiB", "perplexity", "same token", "KL, nats", "tokens/s"]


def compare(
    names: list[str],
    text: str,
    length: int,
    max_tokens: int,
    *,
    dtype: str = "auto",
    device: str = "auto",
    kv_cache_dtype: str = "auto",
    max_num_seqs: int = 1,
    speed: bool = True,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Result]:
    """Evaluate models on a text, one after the other, and compare them with the first one.

    Args:
        names: names or paths that :func:`fastinfer.hub.resolve` knows.
        text: path of a text file.
        length: tokens of each section of the text; sections are evaluated independently.
        max_tokens: largest number of tokens of all sections.
        dtype, device, kv_cache_dtype: as for :class:`fastinfer.LLM`.
        max_num_seqs: number of sections that are computed at once.
        speed: also measure the speed of decoding.
        progress: function that is called with a description of each step.

    Raises:
        ModelNotFoundError: there is no such model. All are looked up before the first one is loaded.
        RequestError: the text cannot be read, the sections are longer than a model's context, or the models cut the
            text into different tokens. Nothing is loaded before.
    """
    read_text(text)
    device = resolve_device(device)
    cache_dtype = kv_cache_dtype_of(kv_cache_dtype, dtype, device)
    paths = {name: hub.resolve(name) for name in names}
    sections, vocab_size = _sections(paths, text, length, max_tokens)
    exact = Precision.of(dtype, device).exact
    reference = _Reference(vocab_size, len(names) > 1)
    results: list[Result] = []
    for name in names:
        progress(name)
        checkpoint = open_checkpoint(paths[name], exact)
        size = sum(file.stat().st_size for file in checkpoint.files if file.suffix != ".json")
        model, _ = load_model(checkpoint, dtype, device, max_model_len=length)
        del checkpoint
        found = predictions(model, sections, cache_dtype, device=device, batch_size=max_num_seqs)
        results.append(Result(name, size, *reference.compare(found)))
        del model, found
    del reference
    if speed:
        prompt = sections.ids[0][:SPEED_PROMPT]
        for result in results:
            progress(f"speed of {result.model}")
            options = {"dtype": dtype, "device": device, "kv_cache_dtype": kv_cache_dtype}
            result.tokens_per_s = _measure_speed(result.model, options, prompt)
    return results


def decode_speed(llm: LLM, prompt: list[int]) -> float:
    """Decode one sequence of :data:`SPEED_TOKENS` greedily and return its speed after the first token, in tokens/s."""
    params = SamplingParams(temperature=0.0, max_tokens=SPEED_TOKENS, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params)
    times = output.metrics
    assert times.first_token_time is not None
    assert times.finish_time is not None
    return (SPEED_TOKENS - 1) / (times.finish_time - times.first_token_time)


def report(results: list[Result]) -> str:
    """Format the results as a table."""
    return format_table([HEADER, *(result.row() for result in results)])


def as_json(results: list[Result]) -> list[dict[str, Any]]:
    """Return the results as JSON values, ``None`` for a number that is not finite."""
    return [finite_json(asdict(result)) for result in results]


def plot(results: list[Result], path: Path) -> Path:
    """Plot perplexity over size into a PNG file and return its path. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for result in results:
        axes.plot(result.bytes / 2**20, result.perplexity, "o", label=Path(result.model).name)
    axes.legend()
    axes.set_xlabel("weight files, MiB")
    axes.set_ylabel("perplexity")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    return path


def _sections(paths: dict[str, Path], text: str, length: int, max_tokens: int) -> tuple[Sections, int]:
    """Cut the text into sections, and check that they are the same for all models and fit into their contexts.

    Returns:
        The sections, and the number of tokens that all models have.
    """
    found: dict[str, Sections] = {}
    vocab_sizes: list[int] = []
    for name, path in paths.items():
        checkpoint = open_checkpoint(path)
        checkpoint.config.check_length(length)
        vocab_sizes.append(checkpoint.config.vocab_size)
        found[name] = read_sections(text, read_tokenizer(checkpoint), length, max_tokens)
    first = next(iter(found))
    for name, sections in found.items():
        if sections != found[first]:
            raise RequestError(f"{name}: expected the tokens that {first} makes of {text}, got others")
    return found[first], min(vocab_sizes)


class _Reference:
    """The first model's log-probabilities, with which those of the others are compared.

    Args:
        vocab_size: number of tokens that all models have. Models may have more rows for tokens that do not exist; the
            distributions that are compared are those of the common tokens.
        is_kept: whether other models follow the first one.
    """

    def __init__(self, vocab_size: int, is_kept: bool) -> None:
        self._vocab_size = vocab_size
        self._is_kept = is_kept
        self._parts: list[tuple[Tensor, Tensor]] = []  # likeliest tokens, and fp16 [n, vocab_size]
        self._is_first = True

    def compare(self, found: Iterable[Iterable[tuple[Tensor, Tensor]]]) -> tuple[float, float, float]:
        """Return perplexity, agreement and divergence of what a model predicts; the first model is the reference."""
        losses, agreeing, divergence, count = 0.0, 0, 0.0, 0
        for index, (tokens, log_probs) in enumerate(chain.from_iterable(found)):
            losses += loss(log_probs, tokens)
            count += len(tokens)
            if log_probs.shape[1] > self._vocab_size:
                log_probs = log_probs[:, : self._vocab_size].log_softmax(-1)
            if self._is_first:
                if self._is_kept:
                    self._parts.append((log_probs.argmax(-1), log_probs.half()))
                continue
            likeliest, rounded = self._parts[index]
            agreeing += int((log_probs.argmax(-1) == likeliest).sum())
            first = rounded.float()
            p = first.exp()
            divergence += float(torch.where(p > 0, p * (first - log_probs), 0.0).sum())
        is_first, self._is_first = self._is_first, False
        agreement = 1.0 if is_first else agreeing / count
        return exponential(losses / count), agreement, divergence / count


def _measure_speed(name: str, options: dict[str, Any], prompt: list[int]) -> float:
    """Return the median speed of decoding one sequence, in tokens/s."""
    llm = LLM(name, max_model_len=SPEED_PROMPT + SPEED_TOKENS, enable_prefix_caching=False, **options)
    speeds = [decode_speed(llm, prompt) for _ in range(SPEED_REPEATS + 1)]
    return median(speeds[1:])  # the first run is the warm-up
