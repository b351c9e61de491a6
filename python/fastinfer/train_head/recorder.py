"""The model's side of the training: an engine answers prompts and records what a draft head reads and predicts."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fastinfer.engine.batch_inputs import StepResult
from fastinfer.engine.chunk import Chunk
from fastinfer.engine.engine import Engine
from fastinfer.evaluation.recording import recording_config
from fastinfer.models.batch import Batch
from fastinfer.models.decoder import Decoder
from fastinfer.sampling_params import SamplingParams
from fastinfer.tokenizers.tokenizer import Tokenizer

# Longest prompt and answer together, in tokens.
LENGTH = 256
# Longest prompt, which leaves as much room for an answer.
MAX_PROMPT = LENGTH // 2
# Number of likeliest tokens that are recorded of each distribution.
TOP_K = 32
# Temperature of every second answer; the others are greedy.
TEMPERATURE = 0.7


@dataclass(frozen=True, eq=False)
class Answer:
    """A prompt with the model's answer, and what the model computed.

    Attributes:
        tokens: [n] int64, prompt and answer without its last token, whose hidden states nobody computes.
        aux: [n, layers * hidden] bf16, the hidden states that the head reads, at each token.
        first: index of the last token of the prompt, the first whose next token the model has drawn.
        top_tokens, top_probs: [n - first, k] int32 and fp16, the likeliest next tokens from ``first`` on, and their
            probabilities.
    """

    tokens: Tensor
    aux: Tensor
    first: int
    top_tokens: Tensor
    top_probs: Tensor


class Recorder:
    """An engine that answers prompts and records them.

    Args:
        model, tokenizer: the model.
        aux_layers: the layers whose inputs the head reads.

    Attributes:
        engine: the engine, which runs operator by operator.
    """

    def __init__(self, model: Decoder, tokenizer: Tokenizer, aux_layers: Iterable[int]) -> None:
        layers = [layer - 1 for layer in aux_layers]
        self._scale = model.config.stream_scale
        self._states: dict[int, Tensor] = {}
        self._pieces: defaultdict[str, list[tuple[Tensor, Tensor, Tensor]]] = defaultdict(list)
        tapped = model.with_taps({layer: partial(self._keep, layer) for layer in layers})
        self.engine = Engine(tapped, tokenizer, recording_config(LENGTH))

    def answers(self, prompts: list[list[int]], first_seed: int, *, greedy: bool = False) -> Iterator[Answer]:
        """Answer prompts, and yield each answer as soon as it is complete.

        Args:
            prompts: the prompts, of at most ``MAX_PROMPT`` tokens.
            first_seed: seed of the first; the others have the next ones. Odd seeds sample, unless ``greedy``.
            greedy: whether all answers are greedy.
        """
        engine = self.engine
        engine.worker.on_result = self._end_step
        try:
            for seed, prompt in enumerate(prompts, start=first_seed):
                temperature = 0.0 if greedy or seed % 2 == 0 else TEMPERATURE
                params = SamplingParams(temperature=temperature, seed=seed, max_tokens=LENGTH - len(prompt))
                engine.add_request(prompt, params)
            while engine.has_unfinished:
                for output in engine.step():
                    if output.finished:
                        text = [*output.prompt_token_ids, *output.outputs[0].token_ids]  # type: ignore[union-attr]
                        yield self._answer(output.request_id, text[:-1], len(output.prompt_token_ids) - 1)
        finally:
            engine.worker.on_result = None
            self._pieces.clear()

    def _keep(self, layer: int, x: Tensor, batch: Batch) -> None:
        self._states[layer] = (x * self._scale).bfloat16() if self._scale != 1.0 else x.to(torch.bfloat16, copy=True)

    def _end_step(self, chunks: list[Chunk], result: StepResult) -> None:
        aux = torch.cat([self._states[layer] for layer in sorted(self._states)], -1)
        probs, tokens = result.logits.float().softmax(-1).topk(TOP_K)
        row = 0
        for chunk in chunks:
            pieces, rows = self._pieces[chunk.sequence.request_id], slice(row, row + chunk.num_rows)
            if chunk.start == 0:
                pieces.clear()  # after a preemption the sequence is computed again
            pieces.append((aux[chunk.hidden_rows], tokens[rows].int(), probs[rows].half()))
            row = rows.stop

    def _answer(self, request_id: str, tokens: list[int], first: int) -> Answer:
        aux, top_tokens, top_probs = (torch.cat(parts) for parts in zip(*self._pieces.pop(request_id), strict=True))
        return Answer(torch.tensor(tokens), aux[: len(tokens)], first, top_tokens, top_probs)
