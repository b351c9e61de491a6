"""Sampling compared with torch, which sorts, accumulates, filters and draws."""

import torch
from harness import Cases, Setting, cold_inputs, compare, main

from fastinfer import ops

VOCAB = 128256
ROWS = [1, 16, 128]
# temperature, top_k, top_p
FILTERS = {
    "greedy": (0.0, 0, 1.0),
    "plain": (0.8, 0, 1.0),
    "top-k 50": (0.8, 50, 1.0),
    "top-k 50, top-p 0.9": (0.8, 50, 0.9),
    "top-p 0.9": (0.8, 0, 0.9),
}


def run(setting: Setting) -> Cases:
    cases = setting.cases
    vocab = setting.size(VOCAB, 1000)
    for rows in ROWS if setting.device == "cuda" and not setting.rehearsal else ROWS[:2]:
        # Peaked like a model's logits; with flatter ones top-p 0.9 keeps a third of the vocabulary.
        inputs = cold_inputs(lambda rows=rows: (3 * torch.randn(rows, vocab, device=setting.device),))
        for label, (temperature, top_k, top_p) in FILTERS.items():
            parameters = (
                torch.full((rows,), temperature, device=setting.device),
                torch.full((rows,), top_k, dtype=torch.int32, device=setting.device),
                torch.full((rows,), top_p, device=setting.device),
                torch.zeros(rows, device=setting.device),
                *torch.arange(2 * rows, device=setting.device).view(2, rows),
            )

            def torch_sample(logits, temperature=temperature, top_k=top_k, top_p=top_p):  # type: ignore[no-untyped-def]
                if temperature == 0:
                    return logits.argmax(-1)
                logits = logits / temperature
                if top_k == 0 and top_p == 1:
                    return (logits.softmax(-1) / torch.empty_like(logits).exponential_()).argmax(-1)
                values, order = logits.sort(-1, descending=True)
                if top_k:
                    values[:, top_k:] = -torch.inf
                weights = values.softmax(-1)
                weights = weights.masked_fill(weights.cumsum(-1) - weights > top_p, 0)
                drawn = (weights / torch.empty_like(weights).exponential_()).argmax(-1, keepdim=True)
                return order.gather(-1, drawn)

            cases[f"{rows} x {VOCAB}, {label}"] = compare(
                {
                    "fastinfer": lambda logits, parameters=parameters: ops.sample(
                        logits, *parameters, num_logprobs=None
                    ),
                    "torch": torch_sample,
                },
                inputs,
                repeats=setting.repeats,
                bytes_moved=4 * rows * vocab,
            )
    return cases


if __name__ == "__main__":
    main("sample", run, run)
