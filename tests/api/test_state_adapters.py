"""LoRA adapters of models whose layers have states or latent attention: the texts of PEFT, through the whole engine."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.tiny_folder import write_tiny_folder

from fastinfer import LLM, SamplingParams

PROMPTS = [[(11 * i + 7 * j) % 256 for j in range(length)] for i, length in enumerate((1, 5, 40, 77))]
PARAMS = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
MODULES = {
    "qwen3.5": ["in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj", "q_proj"],
    "lfm2": ["in_proj", "out_proj", "q_proj", "w1"],
    "granite-hybrid": ["in_proj", "out_proj", "input_linear"],
    "deepseek-v3": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
    "kimi-linear": ["q_proj", "f_b_proj", "b_proj", "g_a_proj", "kv_a_proj_with_mqa", "o_proj"],
}


def texts_of(model: Any) -> list[list[int]]:
    options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return [
        model.generate(input_ids=torch.tensor([prompt]), **options)[0, len(prompt) :].tolist() for prompt in PROMPTS
    ]


@pytest.mark.parametrize("family", MODULES)
def test_texts_are_those_of_peft(family: str, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model  # not in each worker: takes two seconds

    """In one batch with requests without an adapter, from the prefix cache, and after the weights were away."""
    folder = write_tiny_folder(tmp_path / "tiny", family)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain = texts_of(model)
    peer = get_peft_model(model, LoraConfig(r=3, lora_alpha=12, target_modules=MODULES[family]))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in peer.named_parameters():
            if ".lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 5)
    peer.save_pretrained(tmp_path / "adapter")
    adapted = texts_of(peer)
    assert sum(one != other for one, other in zip(plain, adapted, strict=True)) > 1
    llm = LLM(str(folder), dtype="float32", max_loras=1, max_num_batched_tokens=9)
    llm.load_adapter("mine", tmp_path / "adapter")
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS for _ in range(2)]
    for level in (0, 1, 2):
        if level:
            llm.sleep(level)
            llm.wake_up()
        for _ in range(2):
            outputs = llm.generate(prompts, PARAMS, adapter=["mine", None] * len(PROMPTS))
            texts = [output.outputs[0].token_ids for output in outputs]
            assert (texts[::2], texts[1::2]) == (adapted, plain)
    assert llm.engine.stats().num_hit_tokens > 0
    assert llm.engine.stats().num_failed_graphs == 0
