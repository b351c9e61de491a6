"""Measurement of one row of the ablation, in its own process so that its peak memory can be measured.

``python -m fastinfer.benchmarks.ablation_row MESSAGE`` takes JSON and prints the result as JSON. A message with ``row``
asks for a measurement, one with ``rows`` for their checks.
"""

import json
import random
import sys
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fastinfer import hub
from fastinfer.benchmarks.ablation_rows import ROWS, Row
from fastinfer.benchmarks.batching import Static
from fastinfer.benchmarks.no_kv_cache import replay_without_kv_cache
from fastinfer.benchmarks.process_memory import peak_memory, reset_peak_memory
from fastinfer.benchmarks.prompts import COPY_HEAVY, OTHERS, SYSTEM
from fastinfer.benchmarks.repack import check_form, repack, weight_bytes
from fastinfer.benchmarks.replay import Job, Replay, longest_sequence, replay
from fastinfer.benchmarks.subject import Subject
from fastinfer.engine.config import EngineConfig
from fastinfer.engine.construction import check_draft_model
from fastinfer.engine.engine import Engine
from fastinfer.engine.prompt_layout import Piece, PromptLayout
from fastinfer.errors import FastinferError, RequestError
from fastinfer.models import load_weights, open_checkpoint
from fastinfer.models.checkpoint import Checkpoint
from fastinfer.models.config import Precision
from fastinfer.models.decoder import Decoder
from fastinfer.sampling_params import SamplingParams
from fastinfer.utils.torch_threads import set_num_threads

OWN_TOKENS = 8  # that precede the shared text of long prompts
WARM_UP_S = 1.0  # limit of rows without a KV cache; they use no graphs, so the first token warms up everything


@dataclass(frozen=True)
class Settings:
    """Settings shared by all rows.

    Attributes:
        model: name or path of the model.
        requests: number of requests, which arrive together.
        new_tokens: largest number of generated tokens of a request; each has at least a quarter of it.
        batch_size: number of requests that run at the same time, in rows that run several.
        speculative_tokens: largest number of drafted tokens per step.
        document_tokens: length of the text that long prompts share.
        attention_share: share of their attention that the blocks hold which tokens read, with sparse attention.
        draft_model: name or path of a draft model or a draft head; ``None`` without the row that needs it.
        limit_s: time limit of rows without a KV cache, in seconds.
        loading: options of :meth:`Subject.load`.
        threads: number of CPU threads; ``None`` for one per core.
    """

    model: str
    requests: int
    new_tokens: int
    batch_size: int
    speculative_tokens: int
    limit_s: float
    document_tokens: int
    attention_share: float
    draft_model: str | None = None
    loading: dict[str, Any] = field(default_factory=dict)
    threads: int | None = None


@dataclass(frozen=True)
class Measured:
    """Measurements of one run of a row.

    Attributes:
        seconds: duration of the run.
        num_tokens, num_requested: numbers of generated and of requested tokens, which differ only if the time limit
            ended the run.
        first_token_s: time to the first token of each request, from their common arrival.
        gaps_s: seconds between successive tokens of a request.
        weight_bytes: size of the model's weights.
        peak_memory: peak memory of the process during the run, in bytes.
        num_after_end: number of tokens generated after a text's end-of-sequence token.
        num_cached_tokens: number of prompt tokens found in the prefix cache.
        num_drafted, num_accepted: numbers of drafted and of accepted tokens.
    """

    seconds: float
    num_tokens: int
    num_requested: int
    first_token_s: list[float]
    gaps_s: list[float]
    weight_bytes: int
    peak_memory: int
    num_after_end: int
    num_cached_tokens: int
    num_drafted: int
    num_accepted: int


def make_jobs(subject: Subject, row: Row, settings: Settings) -> list[Job]:
    """Create the requests: a common system prompt, alternately copy-heavy and other questions, mixed output lengths.

    Long prompts have a shared text of random tokens instead of the system prompt, and a few tokens of their own before.
    End-of-sequence is ignored, because answers differ between forms of weights, but their lengths must not.
    """
    rng, new_tokens = random.Random(0), settings.new_tokens
    messages = [message for pair in zip(COPY_HEAVY, OTHERS, strict=True) for message in pair]
    jobs = []
    texts = random.Random(1)
    document = subject.random_prompt(texts, settings.document_tokens)
    for index in range(settings.requests):
        params = SamplingParams(
            temperature=0, max_tokens=rng.randint(max(new_tokens // 4, 1), new_tokens), ignore_eos=True
        )
        message = messages[index % len(messages)]
        if row.long_prompts:
            own = subject.random_prompt(texts, OWN_TOKENS)
            layout = long_prompt(own, document, subject.chat_prompt(message), row.modules)
            jobs.append(Job(layout.token_ids, params, layout=layout if row.modules else None))
        else:
            jobs.append(Job(subject.chat_prompt(message, SYSTEM), params))
    return jobs


def long_prompt(own: list[int], document: list[int], message: list[int], are_modules: bool) -> PromptLayout:
    """Lay out a prompt: its own tokens, the halves of the shared text, which may be modules, and the message."""
    pieces, position = [], 0
    half = len(document) // 2
    for tokens, is_shared in ((own, False), (document[:half], True), (document[half:], True), (message, False)):
        pieces.append(Piece(tokens, position, is_module=is_shared and are_modules))
        position += len(tokens)
    return PromptLayout(pieces, EngineConfig.block_size, recomputed_blocks=1)


def measure(subject: Subject, row: Row, settings: Settings, jobs: list[Job]) -> Measured:
    """Warm up and measure a row. The subject's weights have the form of the row already."""
    longest = longest_sequence(jobs)
    batch_size = 1 if row.batching is None else settings.batch_size
    if row.draft_model:
        dtype = settings.loading.get("dtype", "auto")
        draft = load_weights(_open_draft_model(subject, settings, longest), dtype, subject.device, longest)
        subject = replace(subject, draft_model=draft)
    engine = subject.make_engine(
        max_model_len=longest,
        max_num_seqs=batch_size,
        enable_prefix_caching=row.prefix_caching,
        num_speculative_tokens=settings.speculative_tokens if row.speculation or row.draft_model else 0,
        sparse_attention=settings.attention_share if row.sparse_attention else None,
    )
    _run(engine, row, _warm_up(jobs[:batch_size]), batch_size, WARM_UP_S)
    engine.block_manager.reset_prefix_cache()
    before = engine.stats()
    reset_peak_memory()
    run = _run(engine, row, jobs, batch_size, settings.limit_s)
    after = engine.stats()
    decoder = subject.model
    return Measured(
        seconds=run.seconds,
        num_tokens=run.num_tokens,
        num_requested=sum(job.params.max_tokens or 0 for job in jobs),
        first_token_s=[timeline.first_token_s for timeline in run.timelines if timeline.moments],
        gaps_s=run.gaps_s,
        weight_bytes=weight_bytes(decoder) if isinstance(decoder, Decoder) else 0,
        peak_memory=peak_memory(),
        num_after_end=sum(_num_after_end(t.token_ids, subject.tokenizer.eos_ids) for t in run.timelines),
        num_cached_tokens=sum(timeline.num_cached_tokens for timeline in run.timelines),
        num_drafted=after.num_drafted_tokens - before.num_drafted_tokens,
        num_accepted=after.num_accepted_tokens - before.num_accepted_tokens,
    )


def check(subject: Subject, row: Row, settings: Settings) -> None:
    """Check that a row can be measured, as far as that is known before.

    Raises:
        FastinferError: the model cannot have the row's form of weights on its device, the context is too short, or
            the draft model does not fit.
    """
    assert isinstance(subject.model, Decoder)
    check_form(subject.model, row.weights)
    if row.weights != "int4" and subject.device != "cpu":
        raise RequestError(f"--rows: {row.key} repacks the weights, which needs --device cpu, got {subject.device}")
    longest = longest_sequence(make_jobs(subject, row, settings))
    subject.check_context(longest, f"the row {row.key}")
    if row.draft_model:
        _open_draft_model(subject, settings, longest)


def _open_draft_model(subject: Subject, settings: Settings, max_model_len: int) -> Checkpoint:
    """Open the draft model and check that it fits, see :func:`fastinfer.engine.construction.check_draft_model`."""
    assert settings.draft_model is not None
    exact = Precision.of(settings.loading.get("dtype", "auto"), subject.device).exact
    checkpoint = open_checkpoint(hub.resolve(settings.draft_model), exact)
    config = EngineConfig(num_speculative_tokens=settings.speculative_tokens)
    check_draft_model(config, subject.model.config, checkpoint.config, max_model_len)
    return checkpoint


def _warm_up(jobs: list[Job]) -> list[Job]:
    """Return jobs with the same prompts that end one after the other, so that every batch size records its graph."""
    lengths = [min(2 + 2 * (len(jobs) - index), job.params.max_tokens or 0) for index, job in enumerate(jobs)]
    return [replace(job, params=replace(job.params, max_tokens=n)) for job, n in zip(jobs, lengths, strict=True)]


def _run(engine: Engine, row: Row, jobs: list[Job], batch_size: int, limit_s: float) -> Replay:
    if not row.kv_cache:
        return replay_without_kv_cache(engine, jobs, batch_size, limit_s)
    return replay(engine, jobs, Static(batch_size) if row.batching == "static" else None)


def _num_after_end(token_ids: list[int], eos_ids: frozenset[int]) -> int:
    ends = [index for index, token_id in enumerate(token_ids) if token_id in eos_ids]
    return len(token_ids) - ends[0] - 1 if ends else 0


def main(message: dict[str, Any]) -> dict[str, Any]:
    """Load the model, and measure the row or check the rows that ``message`` names.

    Returns:
        The fields of :class:`Measured`, or the device that the model is on.
    """
    settings = Settings(**message["settings"])
    rows = {row.key: row for row in ROWS}
    if settings.threads is not None:
        set_num_threads(settings.threads)
    loaded = Subject.load(settings.model, **settings.loading)
    assert isinstance(loaded.model, Decoder)
    if "rows" in message:
        for key in message["rows"]:
            check(loaded, rows[key], settings)
        return {"device": loaded.device}
    row = rows[message["row"]]
    subject = replace(loaded, model=repack(loaded.model, row.weights))
    del loaded  # frees the original weights, which do not count as the row's memory
    return asdict(measure(subject, row, settings, make_jobs(subject, row, settings)))


if __name__ == "__main__":
    try:
        print(json.dumps(main(json.loads(sys.argv[1]))))
    except FastinferError as error:
        sys.exit(str(error))
