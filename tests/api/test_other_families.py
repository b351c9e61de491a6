"""Families with parts of their own in an engine: prompts in chunks, decoding, recorded steps, as transformers."""

from pathlib import Path

import pytest
import torch
from support.families import make_model, some_tokens
from support.tiny_folder import write_byte_tokenizer

from fastinfer import LLM, SamplingParams


@pytest.mark.parametrize("family", ["hunyuan", "nanochat", "phi", "gpt-neox", "cohere2-moe", "mellum"])
def test_texts_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    model.save_pretrained(tmp_path)
    write_byte_tokenizer(tmp_path)
    llm = LLM(str(tmp_path), dtype="float32", max_num_batched_tokens=16)
    prompt = some_tokens()[:70]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    [output] = llm.generate([{"prompt_token_ids": prompt}], params)
    text = output.outputs[0].token_ids
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + list(text)])).logits[0]
    assert list(text) == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    assert llm.engine.stats().num_failed_graphs == 0
