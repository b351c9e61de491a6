"""One decode step of a random model with the shape of Llama 3.1 8B, up to the drawn token, in one CUDA graph.

It uses only fastinfer.ops and so measures the kernels without the engine. Weights are bf16, or int4 in groups of 128;
the bytes counted are those of the weights and of the cached keys and values.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from harness import Cases, Setting, compare, main
from torch import Tensor

from fastinfer import ops

BLOCK_SIZE = 16
GROUP = 128
EPS = 1e-5


@dataclass(frozen=True)
class Shape:
    hidden: int = 4096
    layers: int = 32
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    intermediate: int = 14336
    vocab: int = 128256

    @property
    def qkv(self) -> int:
        return (self.q_heads + 2 * self.kv_heads) * self.head_dim


SMALL = Shape(hidden=128, layers=2, q_heads=4, kv_heads=2, head_dim=64, intermediate=128, vocab=1024)
# (sequences, context)
BATCHES = [(1, 1024), (1, 8192), (16, 1024), (64, 1024)]


@dataclass
class Linear:
    """Linear layer with a random weight; ``product`` takes the input and the options of fused operations."""

    product: Callable[..., Tensor]
    bytes: int

    @classmethod
    def make(cls, rows: int, columns: int, bits: int, device: str) -> "Linear":
        if bits == 16:
            weight = torch.empty(rows, columns, dtype=torch.bfloat16, device=device).normal_(std=columns**-0.5)
            return cls(lambda x, **fused: ops.gemm(x, weight, **fused), weight.nbytes)
        q = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, device=device)
        qweight = ops.int4_pack(q)
        scales = ops.pack_scales(torch.full((rows, columns // GROUP), columns**-0.5 / 4, device=device).half())
        size = qweight.nbytes + scales.nbytes
        return cls(lambda x, **fused: ops.int4_gemm(x, qweight, scales, None, rows, **fused), size)


@dataclass
class Layer:
    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear
    norms: tuple[Tensor, Tensor]
    caches: tuple[Tensor, Tensor]


@dataclass
class Model:
    """Weights, and the state of a batch whose sequences all decode at the same position."""

    shape: Shape
    bits: int
    seqs: int
    context: int
    device: str
    layers: list[Layer] = field(default_factory=list)

    def __post_init__(self) -> None:
        s, device = self.shape, self.device
        blocks = -(-self.context // BLOCK_SIZE)
        cache_shape = (self.seqs * blocks, BLOCK_SIZE, s.kv_heads, s.head_dim)
        self.embeddings = torch.randn(s.vocab, s.hidden, device=device).bfloat16()
        self.norm = torch.ones(s.hidden, device=device)
        self.logits = Linear.make(s.vocab, s.hidden, self.bits, device)
        for _ in range(s.layers):
            self.layers.append(
                Layer(
                    qkv=Linear.make(s.qkv, s.hidden, self.bits, device),
                    out=Linear.make(s.hidden, s.q_heads * s.head_dim, self.bits, device),
                    gate_up=Linear.make(2 * s.intermediate, s.hidden, self.bits, device),
                    down=Linear.make(s.hidden, s.intermediate, self.bits, device),
                    norms=(torch.ones(s.hidden, device=device), torch.ones(s.hidden, device=device)),
                    caches=tuple(torch.randn(cache_shape, device=device, dtype=torch.bfloat16) for _ in "kv"),
                )
            )
        self.table = torch.arange(self.seqs * blocks, dtype=torch.int32, device=device).view(self.seqs, blocks)
        self.seq_lens = torch.full((self.seqs,), self.context, dtype=torch.int32, device=device)
        self.query_start = torch.arange(self.seqs + 1, dtype=torch.int32, device=device)
        self.positions = torch.full((self.seqs,), self.context - 1, dtype=torch.int64, device=device)
        self.slots = torch.arange(1, self.seqs + 1, device=device) * blocks * BLOCK_SIZE - 1
        self.cos_sin = ops.cos_sin_cache(s.head_dim, self.context, base=500000.0).to(device)
        filters = (0.8, torch.float32), (50, torch.int32), (0.9, torch.float32), (0.0, torch.float32)
        self.sampling = [torch.full((self.seqs,), value, dtype=dtype, device=device) for value, dtype in filters]
        self.seeds = torch.arange(self.seqs, device=device)

    @property
    def bytes_read(self) -> int:
        weights = sum(
            linear.bytes for layer in self.layers for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)
        )
        row = 2 * self.shape.kv_heads * self.shape.head_dim * 2
        return weights + self.logits.bytes + self.seqs * self.context * row * self.shape.layers

    def step(self, tokens: Tensor) -> Tensor:
        """Compute the next tokens from tokens [seqs]."""
        s = self.shape
        plan = ops.paged_attention_plan(self.seq_lens, self.query_start, s.q_heads, s.kv_heads, s.head_dim)
        x = ops.embedding(self.embeddings, tokens)
        for layer in self.layers:
            qkv = layer.qkv.product(x, norm_weight=layer.norms[0], eps=EPS).unflatten(1, (-1, s.head_dim))
            q, k, v = qkv.split([s.q_heads, s.kv_heads, s.kv_heads], dim=1)
            ops.norm_rotary_store(
                *(q, k, v, None, None, EPS, self.positions, self.cos_sin, False),
                *(*layer.caches, None, None, self.slots),
            )
            attended = ops.paged_attention(
                q, *layer.caches, self.table, self.seq_lens, self.query_start, plan=plan
            ).flatten(1)
            x = layer.out.product(attended, residual=x)
            hidden = layer.gate_up.product(x, norm_weight=layer.norms[1], eps=EPS, activation="silu")
            x = layer.down.product(hidden, residual=x)
        logits = self.logits.product(x, norm_weight=self.norm, eps=EPS).float()
        return ops.sample(logits, *self.sampling, self.seeds, self.positions, num_logprobs=None).tokens


def run(setting: Setting) -> Cases:
    cases = setting.cases
    for bits in (16, 4):
        for seqs, context in BATCHES:
            shape = SMALL if setting.rehearsal else Shape()
            model = Model(shape, bits, setting.size(seqs, 2), setting.size(context, 40), setting.device)
            tokens = torch.arange(model.seqs, device=setting.device)
            label = f"{'bf16' if bits == 16 else 'int4'}, {seqs} at {context}"
            cases[label] = compare(
                {"fastinfer": model.step}, [(tokens,)], repeats=setting.repeats, bytes_moved=model.bytes_read
            )
            del model
    return cases


if __name__ == "__main__":
    main("decode_step", cuda=run)
