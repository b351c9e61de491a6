"""Comparison of models on one text: size, perplexity, agreement with the first model, and speed."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fastinfer import hub
from fastinfer.errors import RequestError
from fastinfer.evaluation.perplexity import log_probabilities, loss, split_sections
from fastinfer.evaluation.text_file import read_text, read_tokens
from fastinfer.llm import LLM, kv_cache_dtype_of
from fastinfer.models import load_model, open_checkpoint
from fastinfer.models.config import Precision
from fastinfer.sampling_params import SamplingParams
from fastinfer.utils.device import resolve_device
from fastinfer.utils.table import format_table

SPEED_PROMPT, SPEED_TOKENS, SPEED_REPEATS = 32, 64, 3


@dataclass
class Result:
    """Results of one model.

    Attributes:
        model: the model's name as the user gave it.
        bytes: size of the weight files.
        perplexity: perplexity on the text.
        agreement: share of the positions whose most likely token is also the first model's.
        divergence: mean Kullback-Leibler divergence from the first model's distribution, in nats.
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
        max_tokens: largest number of tokens of the text to use.
        dtype, device, kv_cache_dtype: as for :class:`fastinfer.LLM`.
        max_num_seqs: number of sections that are computed at once.
        speed: also measure the speed of decoding.
        progress: function that is called with a description of each step.

    Raises:
        ModelNotFoundError: there is no such model. All are looked up before the first one is loaded.
        RequestError: the text cannot be read, or the models cut it into different tokens.
    """
    read_text(text)
    device = resolve_device(device)
    cache_dtype = kv_cache_dtype_of(kv_cache_dtype, dtype, device)
    paths = [hub.resolve(name) for name in names]
    results: list[Result] = []
    reference: list[tuple[Tensor, Tensor]] = []
    texts: list[list[int]] = []
    for name, path in zip(names, paths, strict=True):
        progress(name)
        checkpoint = open_checkpoint(path, Precision.of(dtype, device).exact)
        size = sum(file.stat().st_size for file in checkpoint.files if file.suffix != ".json")
        model, tokenizer = load_model(checkpoint, dtype, device, max_model_len=length)
        del checkpoint
        sections = split_sections(read_tokens(text, tokenizer), length, max_tokens)
        if texts and sections != texts:
            raise RequestError(f"{name}: expected the tokens that {names[0]} makes of {text}, got others")
        texts = sections
        found = log_probabilities(model, texts, cache_dtype, device=device, batch_size=max_num_seqs)
        figures = list(_evaluate(found, texts, reference))
        means = [sum(column) / len(column) for column in zip(*figures, strict=True)]
        results.append(Result(name, size, math.exp(means[0]), means[1], means[2]))
        del model
    if speed:
        for result in results:
            progress(f"speed of {result.model}")
            options = {"dtype": dtype, "device": device, "kv_cache_dtype": kv_cache_dtype}
            result.tokens_per_s = _measure_speed(result.model, options, texts[0][:SPEED_PROMPT])
    return results


def report(results: list[Result]) -> str:
    """Format the results as a table."""
    return format_table([HEADER, *(result.row() for result in results)])


def as_json(results: list[Result]) -> list[dict[str, Any]]:
    """Return the results as JSON values."""
    return [asdict(result) for result in results]


def plot(results: list[Result], path: Path) -> Path:
    """Plot perplexity over size into a PNG file and return its path. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for result in results:
        axes.plot(result.bytes / 2**20, result.perplexity, "o", label=Path(result.model).name)
    axes.legend()
    axes.set_xlabel("weight files, MiB")
    axes.set_ylabel("perplexity")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _evaluate(
    found: Iterable[Tensor], texts: list[list[int]], reference: list[tuple[Tensor, Tensor]]
) -> Iterator[tuple[float, float, float]]:
    """Yield (loss, agreement, divergence) of each text, from the log-probabilities that a model finds.

    ``reference`` has the most likely tokens and the fp16 log-probabilities of the first model for each text. If it is
    empty, the model is the first one and fills it.
    """
    is_first = not reference
    for index, log_probs in enumerate(found):
        likeliest = log_probs.argmax(-1)
        if is_first:
            reference.append((likeliest, log_probs.half()))
        first_likeliest, first = reference[index][0], reference[index][1].float()
        agreement = float((likeliest == first_likeliest).float().mean())
        divergence = float((first.exp() * (first - log_probs)).sum(-1).mean())
        yield loss(log_probs, texts[index]), agreement, 0.0 if is_first else divergence


def _measure_speed(name: str, options: dict[str, Any], prompt: list[int]) -> float:
    """Return the median speed of decoding one sequence, in tokens/s."""
    llm = LLM(name, max_model_len=SPEED_PROMPT + SPEED_TOKENS, enable_prefix_caching=False, **options)
    params = SamplingParams(temperature=0.0, max_tokens=SPEED_TOKENS, ignore_eos=True)
    speeds = []
    for _ in range(SPEED_REPEATS + 1):  # the first run is the warm-up
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params)
        times = output.metrics
        assert times.first_token_time is not None
        assert times.finish_time is not None
        speeds.append((SPEED_TOKENS - 1) / (times.finish_time - times.first_token_time))
    return sorted(speeds[1:])[SPEED_REPEATS // 2]
