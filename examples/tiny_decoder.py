"""A Llama decoder made of the operators alone: reads a Hugging Face folder and prints greedy text.

    python examples/tiny_decoder.py FOLDER "Once upon a time"

A layer is seven calls: norm + QKV, rotation, cache store, attention, output + residual; then norm + gate and up +
activation, down + residual. The weights stay as they are in the file; examples/faster_transformers.py quantises.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from fastinfer import ops

BLOCK_SIZE = 16


class TinyDecoder:
    def __init__(self, folder: Path, max_tokens: int = 1024) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim = config.get("head_dim") or config["hidden_size"] // self.heads
        self.eps = config["rms_norm_eps"]
        self.weights = load_file(folder / "model.safetensors")
        base = (config.get("rope_parameters") or config)["rope_theta"]
        self.table = ops.cos_sin_cache(self.head_dim, max_tokens, base=base)
        layers = range(config["num_hidden_layers"])
        self.qkv = [torch.cat([self.layer(i, f"self_attn.{name}_proj") for name in "qkv"]) for i in layers]
        self.gate_up = [
            ops.interleave_gate_up(self.layer(i, "mlp.gate_proj"), self.layer(i, "mlp.up_proj")) for i in layers
        ]
        dtype = self.weights["model.norm.weight"].dtype
        pages = max_tokens // BLOCK_SIZE, BLOCK_SIZE, self.kv_heads, self.head_dim
        self.caches = [torch.zeros(2, *pages, dtype=dtype).unbind() for _ in layers]
        self.block_table = torch.arange(pages[0], dtype=torch.int32)[None]  # one sequence with consecutive blocks

    def layer(self, index: int, name: str) -> Tensor:
        return self.weights[f"model.layers.{index}.{name}.weight"]

    def forward(self, ids: Tensor, past: int) -> Tensor:
        """Return the logits [vocab] of the token after ``ids`` [tokens]; ``past`` tokens before are in the cache."""
        count = len(ids)
        positions = torch.arange(past, past + count)
        seq_lens, query_start = torch.tensor([past + count]).int(), torch.tensor([0, count]).int()
        embeddings = self.weights["model.embed_tokens.weight"]
        x = ops.embedding(embeddings, ids)
        for i, (k_cache, v_cache) in enumerate(self.caches):
            norm = self.layer(i, "input_layernorm")
            qkv = ops.gemm(x, self.qkv[i], norm_weight=norm, eps=self.eps).view(count, -1, self.head_dim)
            q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], 1)
            ops.rotary_embedding(q, k, positions, self.table)
            ops.store_kv_cache(k, v, k_cache, v_cache, positions)  # slots are positions here
            out = ops.paged_attention(q, k_cache, v_cache, self.block_table, seq_lens, query_start)
            x = ops.gemm(out.flatten(1), self.layer(i, "self_attn.o_proj"), residual=x)
            norm = self.layer(i, "post_attention_layernorm")
            hidden = ops.gemm(x, self.gate_up[i], norm_weight=norm, eps=self.eps, activation="silu")
            x = ops.gemm(hidden, self.layer(i, "mlp.down_proj"), residual=x)
        head = self.weights.get("lm_head.weight", embeddings)
        return ops.gemm(x[-1:], head, norm_weight=self.weights["model.norm.weight"], eps=self.eps)[0]

    def generate(self, ids: list[int], count: int) -> list[int]:
        """Generate ``count`` tokens, each the likeliest one."""
        output: list[int] = []
        step, past = ids, 0
        for _ in range(count):
            output.append(int(self.forward(torch.tensor(step), past).argmax()))
            step, past = output[-1:], past + len(step)
        return output


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Continue a text greedily with a Llama made of the operators alone.")
    parser.add_argument("folder", type=Path, help="a Llama as Hugging Face saves it, in one safetensors file")
    parser.add_argument("prompt")
    parser.add_argument("--max-tokens", type=int, default=48, help="default: %(default)s")
    args = parser.parse_args(argv)
    tokenizer = Tokenizer.from_file(str(args.folder / "tokenizer.json"))
    ids = TinyDecoder(args.folder).generate(tokenizer.encode(args.prompt).ids, args.max_tokens)
    print(args.prompt + tokenizer.decode(ids))


if __name__ == "__main__":
    main()
