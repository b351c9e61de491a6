"""Time of each kind of layer and of the output layer on a CPU, and the stages that would take equally long.

Decode steps of several sequences and chunks of a prompt are recorded layer by layer, and replayed in turns. A chunk
that is not a prompt's last one needs no logits. The stages are values of ``--pipeline-parallel-layers``.

    python bench/bench_layer_costs.py --sequences 4 --context 1000
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch

from fastinfer import hub, ops
from fastinfer._C import set_num_threads
from fastinfer.engine.model_context import model_context
from fastinfer.models import load_weights, open_checkpoint
from fastinfer.models.batch import Batch
from fastinfer.models.config import ModelConfig
from fastinfer.models.decoder import Decoder
from fastinfer.models.kv_cache import KVCache
from fastinfer.parallel.layer_split import layer_cost, split_layers, stage_starts
from fastinfer.utils.table import format_table

BLOCK_SIZE = 32


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=hub.DEFAULT_MODEL)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--sequences", type=int, default=4, help="sequences of a decode step: one stage's")
    parser.add_argument("--context", type=int, default=100, help="tokens of each sequence, and before the chunk")
    parser.add_argument("--chunk-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1, help="threads of each stage")
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args(argv)
    set_num_threads(args.threads)
    checkpoint = open_checkpoint(hub.resolve(args.model), exact=False)
    model = load_weights(checkpoint, "auto", "cpu", args.context + args.chunk_tokens)
    assert isinstance(model, Decoder)
    config = model.config
    works = {
        f"decode {args.sequences}": random_batch(config, args.sequences, args.context, 1),
        f"chunk {args.chunk_tokens}": random_batch(config, 1, args.context, args.chunk_tokens),
    }
    kinds = [kind_of(config, layer) for layer in range(config.num_layers)]
    counted = [layer_cost(config, layer) for layer in range(config.num_layers)]
    head, starts = config.vocab_size * config.hidden_size, stage_starts(config)
    rows = [["", *dict.fromkeys(kinds), "output layer", "stages"]]
    rows.append(row("weights", "M", [1e-6 * cost for cost in counted], 1e-6 * head, kinds))
    rows[-1].append(stages_text(split_layers(counted, head, args.stages, starts)))
    with torch.inference_mode(), model_context("cpu", False):
        for name, batch in works.items():
            *layers, logits = measure(model, batch, args.rounds)
            rows.append(row(name, "us", layers, logits, kinds))
            is_decode = len(batch.token_ids) == len(batch.seq_lens)
            rows[-1].append(stages_text(split_layers(layers, is_decode * logits, args.stages, starts)))
    print(format_table(rows))


def random_batch(config: ModelConfig, num_seqs: int, context: int, num_tokens: int) -> Batch:
    """Return the next tokens of sequences with a context of random tokens, with logits for each sequence's last one."""
    length, generator = context + num_tokens, torch.Generator().manual_seed(0)
    texts = torch.randint(config.vocab_size, (num_seqs, length), generator=generator)
    batch = Batch.of_texts(texts.tolist(), BLOCK_SIZE)
    kept = torch.arange(num_seqs * length).view(num_seqs, length)[:, context:].flatten()
    return replace(
        batch,
        token_ids=batch.token_ids[kept],
        positions=batch.positions[kept],
        query_start=torch.arange(num_seqs + 1, dtype=torch.int32) * num_tokens,
        slot_mappings=(batch.slot_mappings[0][kept],),
        logits_indices=torch.arange(1, num_seqs + 1) * num_tokens - 1,
        state_writes=torch.full((len(kept),), -1, dtype=torch.int32),
        row_start=torch.arange(len(kept) + 1, dtype=torch.int32),
    )


def measure(model: Decoder, batch: Batch, num_rounds: int) -> list[float]:
    """Return the median time of each layer and of the output layer in microseconds."""
    num_blocks = int(batch.block_tables[0].max()) + 1
    kv_cache = KVCache.of_model(model.config, [num_blocks], BLOCK_SIZE, torch.bfloat16, "cpu", state_dtype=model.dtype)
    for layer in kv_cache.layers:
        for tensor in layer.tensors:
            tensor.zero_()
    is_prompt = len(batch.token_ids) > len(batch.seq_lens)
    graphs, hidden = list[ops.CPUGraph](), torch.empty(0)
    with ops.prompt_rows(0) if is_prompt else nullcontext():
        outputs = model.outputs(batch, kv_cache)
        next(outputs)  # the embedding
        for _ in model.layers:
            graphs.append(ops.CPUGraph())
            with graphs[-1].capture():
                hidden = next(outputs)
    graphs.append(ops.CPUGraph())
    with graphs[-1].capture():
        model.logits(hidden, batch.logits_indices)
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(num_rounds):
        for graph, taken in zip(graphs, times, strict=True):
            start = time.perf_counter()
            graph.replay()
            taken.append(time.perf_counter() - start)
    return [1e6 * statistics.median(taken) for taken in times]


def kind_of(config: ModelConfig, layer: int) -> str:
    """Name what a layer consists of."""
    mixer = "states" if config.has_state(layer) else "window" if config.window(layer) else "attention"
    if not config.has_mlp(layer):
        return mixer
    return f"{mixer}, {'experts' if config.has_experts(layer) else 'MLP'}"


def row(name: str, unit: str, layers: Sequence[float], head: float, kinds: Sequence[str]) -> list[str]:
    """Return a line with the median of each kind of layer."""
    medians = [
        statistics.median(cost for cost, own in zip(layers, kinds, strict=True) if own == kind)
        for kind in dict.fromkeys(kinds)
    ]
    return [f"{name}, {unit}", *(f"{cost:.1f}" for cost in (*medians, head))]


def stages_text(stages: Sequence[range]) -> str:
    return ",".join(str(len(stage)) for stage in stages)


if __name__ == "__main__":
    main()
