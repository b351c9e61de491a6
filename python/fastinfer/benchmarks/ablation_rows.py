"""Rows of the ablation, each of which switches on one more optimisation."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """Configuration of one row.

    Attributes:
        key: name on the command line.
        title: name in the table.
        meaning: description in one sentence.
        weights: form of the weights, see :mod:`fastinfer.benchmarks.repack`.
        kv_cache: whether keys and values of earlier tokens are kept; otherwise every token recomputes the whole text.
        batching: ``"continuous"``, ``"static"``, or ``None`` for one request at a time.
        prefix_caching: whether the prefix cache is on.
        speculation: whether n-gram speculation is on.
        draft_model: whether a draft model or a draft head drafts tokens.
        long_prompts: whether each prompt is a line of its own, a long text that all share, and a question.
        modules: whether the shared text is two prompt modules.
        sparse_attention: whether tokens attend to a part of the text.
        baseline: key of the row that the gain is relative to, which may be this one; ``None`` for the first.
        claim: gain over the first row that published ablations of this kind report.
    """

    key: str
    title: str
    meaning: str
    weights: str = "float32"
    kv_cache: bool = True
    batching: str | None = "continuous"
    prefix_caching: bool = False
    speculation: bool = False
    draft_model: bool = False
    long_prompts: bool = False
    modules: bool = False
    sparse_attention: bool = False
    baseline: str | None = None
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
    Row("continuous", "continuous batch", "KV cache; a waiting request joins as soon as another one ends"),
    Row(
        "int8",
        "+ INT8 weights",
        "the same with 8-bit weights; products round activations to 8 bits",
        "int8",
        claim=14.0,
    ),
    Row("int4", "+ INT4 weights", "the same with 4-bit weights as in the file", "int4"),
    Row("prefix", "+ prefix cache", "the same, and shared prefixes are computed once", "int4", prefix_caching=True),
    Row(
        "speculation",
        "+ speculation",
        "the same, and several tokens drafted from n-grams are verified per step",
        "int4",
        prefix_caching=True,
        speculation=True,
    ),
    Row(
        "draft",
        "+ draft model",
        "as + prefix cache, and several tokens drafted by a draft model or a draft head are verified per step",
        "int4",
        prefix_caching=True,
        draft_model=True,
        baseline="prefix",
    ),
    Row(
        "long",
        "long prompts",
        "as + prefix cache, with a long text that all prompts share, after a line of its own in each",
        "int4",
        prefix_caching=True,
        long_prompts=True,
        baseline="long",
    ),
    Row(
        "modules",
        "+ prompt modules",
        "as long prompts, and the shared text is two prompt modules",
        "int4",
        prefix_caching=True,
        long_prompts=True,
        modules=True,
        baseline="long",
    ),
    Row(
        "sparse",
        "+ sparse attention",
        "as long prompts, and tokens attend to a part of the text",
        "int4",
        prefix_caching=True,
        long_prompts=True,
        sparse_attention=True,
        baseline="long",
    ),
)
