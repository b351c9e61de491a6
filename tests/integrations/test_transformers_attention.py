"""attn_implementation="fastinfer": the same logits and tokens as transformers' own attention."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.families import make_model
from torch import Tensor, nn
from transformers import GptOssConfig, GptOssForCausalLM, StaticCache
from transformers.masking_utils import sliding_window_causal_mask_function

from fastinfer.integrations.transformers import register
from fastinfer.integrations.transformers.attention import attention_forward
from fastinfer.integrations.transformers.mask import attention_mask

FAMILIES = ["llama2", "llama3", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "mixtral", "gpt2"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    register()
    register()  # twice does no harm
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(3, 320, shape, generator=torch.Generator().manual_seed(seed))


def ones_from(lengths: list[int], longest: int) -> Tensor:
    """A mask for padding on the left."""
    return (torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]).long()


def run(model: nn.Module, implementation: str, **inputs: Any) -> Any:
    model.set_attn_implementation(implementation)
    with torch.inference_mode():
        return model(**inputs)


def reference(model: Any) -> str:
    """transformers' sdpa has no softcap, and none of GPT-OSS's sinks."""
    return "eager" if model.config.model_type in ("gemma2", "gpt_oss") else "sdpa"


def assert_logits(model: nn.Module, rows: Tensor | None = None, **inputs: Any) -> None:
    theirs, ours = (run(model, name, **inputs).logits for name in (reference(model), "fastinfer"))
    if rows is not None:
        theirs, ours = theirs[rows], ours[rows]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits(family: str) -> None:
    """Longer than every window."""
    assert_logits(make_model(family), input_ids=tokens(2, 50))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padding(family: str, side: str) -> None:
    mask = ones_from([40, 17, 33], 40)
    if side != "left":
        mask = mask.flip(1)
    if side == "both":
        mask = mask.roll(5, 1).tril(100) * (torch.arange(40) >= 5)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    assert_logits(make_model(family), mask.bool(), input_ids=tokens(3, 40), attention_mask=mask, position_ids=positions)


def test_sinks() -> None:
    config = GptOssConfig(
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=320,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=16,
        max_position_embeddings=256,
    )
    torch.manual_seed(0)
    model = GptOssForCausalLM(config).eval()
    for layer in model.model.layers:
        nn.init.normal_(layer.self_attn.sinks)
    mask = ones_from([40, 17], 40)
    assert_logits(model, mask.bool(), input_ids=tokens(2, 40), attention_mask=mask)


GENERATE: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "beams": {"num_beams": 3},
    "no cache": {"use_cache": False},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", GENERATE)
def test_generate(family: str, kind: str) -> None:
    """Left-padded prompts, tokens beyond every window."""
    if family == "gpt2" and kind == "static":
        pytest.skip("GPT-2 has no static cache")
    model = make_model(family)
    inputs = {"input_ids": tokens(3, 20), "attention_mask": ones_from([20, 7, 13], 20)}
    outputs = []
    for name in (reference(model), "fastinfer"):
        model.set_attn_implementation(name)
        outputs.append(
            model.generate(**inputs, max_new_tokens=24, min_new_tokens=24, do_sample=False, **GENERATE[kind])
        )
    assert torch.equal(*outputs)


@pytest.mark.parametrize("family", ["llama2", "gemma3", "mistral"])
@pytest.mark.parametrize("kind", ["assistant", "lookup"])
def test_assisted_generation(family: str, kind: str) -> None:
    """Several queries at once, and a cache that is cut back."""
    model = make_model(family)
    options: dict[str, Any] = {"prompt_lookup_num_tokens": 3}
    if kind == "assistant":
        options = {"assistant_model": make_model(family, seed=1, num_hidden_layers=2)}
    inputs = {"input_ids": tokens(1, 4).repeat(1, 6), "attention_mask": torch.ones(1, 24, dtype=torch.long)}
    model.set_attn_implementation("eager")
    plain = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    for each in (model, options.get("assistant_model", model)):
        each.set_attn_implementation("fastinfer")
    assert torch.equal(model.generate(**inputs, max_new_tokens=24, do_sample=False, **options), plain)


@pytest.mark.parametrize("family", ["llama2", "gemma3"])
def test_a_row_does_not_see_its_padding(family: str) -> None:
    """Bit for bit: a padded row reads what it would read alone."""
    model, ids = make_model(family), tokens(2, 30)
    ids[1, :11] = 0
    mask = ones_from([30, 19], 30)
    batch = run(model, "fastinfer", input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
    alone = run(model, "fastinfer", input_ids=ids[1:, 11:])
    torch.testing.assert_close(batch.logits[1, 11:], alone.logits[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("padded", [False, True])
def test_compiled_decode_equals_eager(padded: bool) -> None:
    """One graph, with a static cache."""
    model = make_model("llama2")
    model.set_attn_implementation("fastinfer")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    mask = ones_from([12, 5 if padded else 12], 12)
    results = []
    with torch.inference_mode():
        for call in (model, compiled):
            cache = StaticCache(model.config, max_cache_len=32)
            model(input_ids=tokens(2, 12), attention_mask=mask, past_key_values=cache)
            step = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
            results.append(call(input_ids=tokens(2, 1), attention_mask=step, past_key_values=cache).logits)
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-5)


def hole() -> dict[str, Any]:
    mask = torch.ones(1, 12, dtype=torch.long)
    mask[0, 4] = 0
    return {"attention_mask": mask}


REFUSED: dict[str, tuple[str, Any]] = {
    "hole": ("zeros between ones", hole),
    "4-d mask": ("custom attention_mask", lambda: {"attention_mask": torch.ones(1, 1, 12, 12).tril().bool()}),
    "packed": ("packed sequences", lambda: {"position_ids": torch.arange(6).repeat(2)[None], "use_cache": False}),
    "probabilities": ("output_attentions", lambda: {"output_attentions": True}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    message, make = REFUSED[name]
    with pytest.raises(ValueError, match=f"attn_implementation='fastinfer' expects.*{message}"):
        run(make_model("llama2"), "fastinfer", input_ids=tokens(1, 12), **make())


def test_dropout_is_refused() -> None:
    model = make_model("llama2", attention_dropout=0.1).train()
    with pytest.raises(ValueError, match="dropout"):
        run(model, "fastinfer", input_ids=tokens(1, 4))


def test_bidirectional_attention_is_refused() -> None:
    model = make_model("gemma3")
    model.config.is_causal = False
    with pytest.raises(ValueError, match="expects causal masks"):
        run(model, "fastinfer", input_ids=tokens(1, 12))


@pytest.mark.parametrize("name", ["cache", "read_index", "block_table"])
def test_continuous_batching_is_refused(name: str) -> None:
    q = torch.randn(1, 4, 3, 32)
    with pytest.raises(ValueError, match="a paged cache of transformers' continuous batching"):
        attention_forward(torch.nn.Module(), q, q, q, None, **{name: torch.zeros(1)})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"position_bias": torch.zeros(1, 2, 3, 3)}, "got a position_bias in Identity"),
        ({"is_causal": False}, "got attention that is not causal in Identity"),
        ({"output_attentions": True}, "got output_attentions in Identity"),
    ],
)
def test_arguments_of_the_interface_that_are_refused(options: dict[str, Any], message: str) -> None:
    q, k = torch.ones(1, 2, 3, 64), torch.ones(1, 1, 3, 64)
    assert attention_forward(nn.Identity(), q, k, k, None, is_causal=True)[0].shape == (1, 3, 2, 64)
    with pytest.raises(ValueError, match=message):
        attention_forward(nn.Identity(), q, k, k, None, **options)


def test_a_pattern_of_the_models_own_is_refused() -> None:
    assert attention_mask(1, 3, 3) is None
    with pytest.raises(ValueError, match="got a pattern of the model's own"):
        attention_mask(1, 3, 3, use_vmap=True)


@pytest.mark.parametrize("size", [3, 5])
def test_a_window_of_another_size_is_refused(size: int) -> None:
    pattern = sliding_window_causal_mask_function(size)
    assert attention_mask(1, 8, 8, mask_function=pattern, local_size=size) is None
    with pytest.raises(ValueError, match="got another pattern"):
        attention_mask(1, 8, 8, mask_function=pattern, local_size=4)
