"""Draft models whose output layer has a part of the vocabulary alone, with a tensor ``d2t`` that says which."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import load, make_model, some_tokens
from support.toy import always_speculate
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from fastinfer import LLM, SamplingParams
from fastinfer.errors import CheckpointFormatError, RequestError
from fastinfer.evaluation.perplexity import perplexity
from fastinfer.evaluation.text_file import Sections
from fastinfer.formats.safetensors_folder import SINGLE
from fastinfer.models.hf_checkpoint import D2T

VOCAB_SIZE = 320
ROWS = 97


def some_rows() -> Tensor:
    """Tokens in ascending order, as checkpoints have them."""
    order = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    return order[:ROWS].sort().values


def save_folders(folder: Path) -> tuple[Path, Path]:
    """A model, and the same one with some rows of its output layer."""
    model = make_model("llama2")
    whole, reduced = folder / "whole", folder / "reduced"
    for path in (whole, reduced):
        model.save_pretrained(path)
    tokens = some_rows()

    def reduce(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"][tokens].contiguous()
        tensors[D2T] = tokens - torch.arange(ROWS)
        tensors["t2d"] = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill(0, tokens, True)

    edit(reduced, reduce, draft_vocab_size=ROWS)
    return whole, reduced


def edit(folder: Path, change: Any = lambda tensors: None, **config: Any) -> None:
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


def logits_of(folder: Path) -> Tensor:
    """Logits of some hidden states."""
    model = load(folder)
    hidden = torch.randn(5, model.config.hidden_size, generator=torch.Generator().manual_seed(3))
    return model.logits(hidden, torch.arange(5))


def test_its_logits_are_those_of_its_tokens(tmp_path: Path) -> None:
    whole, reduced = save_folders(tmp_path)
    model = load(reduced)
    assert model.draft_tokens is not None
    assert torch.equal(model.draft_tokens, some_rows())
    assert model.config.vocab_size == VOCAB_SIZE
    assert logits_of(reduced).shape == (5, ROWS)
    torch.testing.assert_close(logits_of(reduced), logits_of(whole)[:, some_rows()])


def set_offsets(offsets: Tensor) -> Any:
    return lambda tensors: tensors.update({D2T: offsets})


OFFSETS = some_rows() - torch.arange(ROWS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(D2T), "'d2t' is missing, which draft_vocab_size=97 needs"),
        (set_offsets(OFFSETS[:-1]), r"'d2t' must be \[97\] int64, got \[96\] torch.int64"),
        (set_offsets(OFFSETS[None].clone()), r"'d2t' must be \[97\] int64, got \[1, 97\] torch.int64"),
        (set_offsets(OFFSETS.float()), r"'d2t' must be \[97\] int64, got \[97\] torch.float32"),
        (set_offsets(OFFSETS - 500), r"'d2t' must give tokens in 0\.\.319, got -\d+ for row 0"),
        (set_offsets(OFFSETS + 300), r"'d2t' must give tokens in 0\.\.319, got 3\d\d for row \d+"),
        (set_offsets(torch.full((ROWS,), 2**63 - 1)), r"'d2t' must give tokens in 0\.\.319, got \d+ for row 0"),
        (set_offsets(7 - torch.arange(ROWS)), "'d2t' must give each row another token, got 7 97 times"),
        (lambda tensors: tensors.pop("lm_head.weight"), "'lm_head.weight' is missing"),
        (
            lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}),
            r"lm_head must have the shape \[97, 64\], got \[320, 64\]",
        ),
    ],
)
def test_wrong_tensors_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    _, reduced = save_folders(tmp_path)
    edit(reduced, change)
    with pytest.raises(CheckpointFormatError, match=f"reduced: .*{message}"):
        load(reduced)


def test_a_whole_vocabulary_needs_no_tensor(tmp_path: Path) -> None:
    whole, _ = save_folders(tmp_path)
    edit(whole, draft_vocab_size=VOCAB_SIZE)
    assert load(whole).draft_tokens is None


def test_a_tensor_without_a_size(tmp_path: Path) -> None:
    """All rows of the output layer are expected, so that they must all have a token."""
    whole, _ = save_folders(tmp_path)
    edit(whole, set_offsets(OFFSETS))
    with pytest.raises(CheckpointFormatError, match=r"'d2t' must be \[320\] int64, got \[97\] torch.int64"):
        load(whole)


@pytest.mark.parametrize("size", [VOCAB_SIZE + 1, -1, "97"])
def test_wrong_sizes_are_refused(tmp_path: Path, size: Any) -> None:
    _, reduced = save_folders(tmp_path)
    edit(reduced, draft_vocab_size=size)
    with pytest.raises(CheckpointFormatError, match="draft_vocab_size: expected"):
        load(reduced)


def test_it_is_no_model_of_its_own(tmp_path: Path) -> None:
    _, reduced = save_folders(tmp_path)
    with pytest.raises(RequestError, match="must have logits for all 320 tokens, got a draft model with logits for 97"):
        perplexity(load(reduced), Sections([some_tokens()], 1))


def write_tokenizer(folder: Path) -> None:
    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=letters, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "min_tokens": 2},  # a mask, and draws from spread logits
        {"temperature": 0.0, "repetition_penalty": 1.1},
        {"temperature": 1.0, "seed": 3},
    ],
)
def test_drafts_of_a_checkpoint(tmp_path: Path, options: dict[str, Any]) -> None:
    """Texts are those of the model alone; drafts are right wherever the draft model has the token."""
    whole, reduced = save_folders(tmp_path)
    for path in (whole, reduced):
        write_tokenizer(path)
    params = SamplingParams(max_tokens=40, ignore_eos=True, **options)
    prompts: Any = [{"prompt_token_ids": [5, 9, 200]}, {"prompt_token_ids": [31]}]
    expected = [o.outputs[0].token_ids for o in LLM(str(whole), max_model_len=64).generate(prompts, params)]
    llm = LLM(str(whole), max_model_len=64, draft_model=str(reduced), num_speculative_tokens=3)
    always_speculate(llm.engine)
    assert [o.outputs[0].token_ids for o in llm.generate(prompts, params)] == expected
    stats = llm.engine.stats()
    assert stats.num_accepted_tokens > 5
    assert stats.num_failed_draws == 0
    missing = set(itertools.chain(*expected)) - set(some_rows().tolist())
    assert missing, "some drafts must be wrong"
    with pytest.raises(RequestError, match="got a draft model with logits for 97"):
        LLM(str(reduced), max_model_len=64)
