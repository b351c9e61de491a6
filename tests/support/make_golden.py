"""Writes the golden files of tests/data, which spare the test suite minutes: ``python tests/support/make_golden.py``.

gemma3_270m.npz    transformers' log-probabilities in fp32 for 640 tokens, of the most likely tokens and of random ones
accuracy_fp32.json mean loss of the default model, computed in fp32, of each stretch in tests/models/test_accuracy.py
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))

from transformers import AutoModelForCausalLM  # noqa: E402

from fastinfer import hub  # noqa: E402
from fastinfer.models import load_model  # noqa: E402
from support.paths import DATA  # noqa: E402
from support.teacher_forcing import log_probabilities, mean_loss  # noqa: E402
from support.texts import GEMMA_TOKENS, accuracy_stretches, license_ids  # noqa: E402

LIKELIEST = 8  # tokens stored per position, and as many random ones


def write_gemma() -> None:
    path = hub.resolve("gemma3-270m")
    _, tokenizer = load_model(path)
    ids = license_ids(tokenizer)[:GEMMA_TOKENS]
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    with torch.inference_mode():
        log_probs: Tensor = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    generator = torch.Generator().manual_seed(0)
    others = torch.randint(log_probs.shape[1], (len(ids), LIKELIEST), generator=generator)
    tokens = torch.cat([log_probs.topk(LIKELIEST).indices, others], dim=1)
    loss = np.float64(mean_loss(log_probs, ids))
    np.savez(
        DATA / "gemma3_270m.npz", tokens=tokens.int().numpy(), log_probs=log_probs.gather(1, tokens).numpy(), loss=loss
    )


def write_accuracy() -> None:
    path = hub.resolve(hub.DEFAULT_MODEL)
    model, tokenizer = load_model(path, "float32")
    with torch.inference_mode():
        losses = [mean_loss(log_probabilities(model, ids, "float32"), ids) for ids in accuracy_stretches(tokenizer)]
    (DATA / "accuracy_fp32.json").write_text(json.dumps([round(loss, 6) for loss in losses]) + "\n")


if __name__ == "__main__":
    write_gemma()
    write_accuracy()
