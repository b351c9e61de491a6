"""The rows of the ablation: each switches one more optimisation on."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """What one row runs with.

    Attributes:
        key: its name on the command line.
        title: its name in the table.
        meaning: what it does, in a sentence.
        weights: a form of :mod:`fastinfer.benchmarks.repack`.
        kv_cache: whether keys and values of earlier tokens are kept; else every token recomputes the whole text.
        batching: a policy of the engine; ``None`` for one request at a time.
        prefix_caching, speculation: as in :class:`fastinfer.engine.config.EngineConfig`.
        claim: times the first row's tokens/s that published ablations of this kind report.
    """

    key: str
    title: str
    meaning: str
    weights: str = "float32"
    kv_cache: bool = True
    batching: str | None = "continuous"
    prefix_caching: bool = False
    speculation: bool = False
    claim: float | None = None


ROWS = (
    Row(
        "none",
        "none",
        "one request at a time; every token is a new prompt of the whole text so far; fp32 weights",
        kv_cache=False,
        batching=None,
    ),
    Row("kv", "KV cache", "one request at a time", batching=None, claim=3.0),
    Row(
        "batch",
        "static batch",
        "without a KV cache: the texts of a batch are recomputed together for each token; the next batch starts when "
        "all have ended",
        kv_cache=False,
        batching="static",
        claim=6.0,
    ),
    Row(
        "kv+batch",
        "KV cache + static batch",
        "the next batch starts when all requests of this one have ended",
        batching="static",
        claim=12.0,
    ),
    Row("continuous", "continuous batch", "KV cache; whoever waits joins as soon as another ends"),
    Row(
        "int8",
        "+ INT8 weights",
        "the same, weights of 8 bits, activations rounded to 8 in products",
        "int8",
        claim=14.0,
    ),
    Row("int4", "+ INT4 weights", "the same, weights of 4 bits as in the file", "int4"),
    Row("prefix", "+ prefix cache", "the same, and shared beginnings are computed once", "int4", prefix_caching=True),
    Row(
        "speculation",
        "+ speculation",
        "the same, and n-gram drafts are verified several at a time",
        "int4",
        prefix_caching=True,
        speculation=True,
    ),
)
