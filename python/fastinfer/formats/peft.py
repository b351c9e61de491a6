"""Reader of LoRA adapters as PEFT saves them: ``adapter_config.json`` beside ``adapter_model.safetensors``.

Format: https://huggingface.co/docs/peft/developer_guides/checkpoint. A pickled ``adapter_model.bin`` is refused,
because it can run any code. An adapter with unsupported parts is refused as a whole, because applying only the
supported parts would give a model that nobody has trained.
"""

import hashlib
import math
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fastinfer.errors import AdapterError
from fastinfer.formats.json_fields import JsonFields

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

MAX_RANK = 2**16

# Settings that must be absent, empty or false, because they change the meaning of the matrices.
UNSUPPORTED = (
    "alora_invocation_tokens",
    "fan_in_fan_out",
    "layer_replication",
    "lora_bias",
    "megatron_config",
    "modules_to_save",
    "target_parameters",
    "trainable_token_indices",
)
# Initialisations that do not change the base weights.
INITIALISATIONS = (None, True, False, "gaussian", "eva")

_TENSOR = re.compile(
    r"base_model\.model\.(?:model\.)?layers\.(\d{1,4})\.((?:self_attn|mlp)\.(\w+))\.lora_([AB])\.weight"
)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class LowRank:
    """Low-rank update of one linear layer: ``scale * b @ a`` is added to its weight.

    Attributes:
        name: name of the layer in the file, for error messages.
        a: [rank, in_features].
        b: [out_features, rank].
        scale: alpha divided by the rank, or by the square root of the rank (rsLoRA).
    """

    name: str
    a: Tensor
    b: Tensor
    scale: float

    @property
    def rank(self) -> int:
        """Rank of the update."""
        return self.a.shape[0]


@dataclass(frozen=True, eq=False)
class LoraAdapter:
    """A LoRA adapter.

    Attributes:
        path: folder that the adapter was read from.
        layers: updates by index of the layer and name of the module, one of ``MODULES``.
    """

    path: Path
    layers: dict[tuple[int, str], LowRank]

    @property
    def max_rank(self) -> int:
        """Largest rank of all updates."""
        return max(low_rank.rank for low_rank in self.layers.values())

    @cached_property
    def digest(self) -> str:
        """Hash of all updates: equal for adapters that compute the same, in any process."""
        digest = hashlib.sha256()
        for place, low_rank in sorted(self.layers.items()):
            matrices = low_rank.a.contiguous(), low_rank.b.contiguous()
            digest.update(repr((place, low_rank.scale, [(m.dtype, m.shape) for m in matrices])).encode())
            for matrix in matrices:
                digest.update(matrix.view(torch.uint8).numpy().data)
        return digest.hexdigest()


def read_adapter(path: Path) -> LoraAdapter:
    """Read the folder of an adapter.

    Raises:
        AdapterError: a file is missing or damaged, or the adapter needs something that is not implemented: a bias,
            DoRA, saved modules or embeddings, layers other than ``MODULES``, or an initialisation that changes the base
            weights.
    """
    config = _Config(path / "adapter_config.json")
    file = path / "adapter_model.safetensors"
    if not file.is_file():
        pickled = " (adapter_model.bin is a pickle, which can run any code: save the adapter as safetensors)"
        raise AdapterError(f"{file}: no such file" + (pickled if (path / "adapter_model.bin").exists() else ""))
    halves: dict[tuple[int, str], dict[str, Tensor]] = {}
    names: dict[tuple[int, str], str] = {}
    try:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (not a dictionary)
                match = _TENSOR.fullmatch(name)
                if match is None or match[3] not in MODULES:
                    raise AdapterError(
                        f"{file}: tensor {name!r} is not supported; only A and B of {', '.join(MODULES)}"
                    )
                key = int(match[1]), match[3]
                names[key] = f"layers.{match[1]}.{match[2]}"
                halves.setdefault(key, {})[match[4]] = tensors.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{file}: not a valid safetensors file: {error}") from error
    if not halves:
        raise AdapterError(f"{file}: no tensors")
    layers = {key: _low_rank(file, names[key], pair, config) for key, pair in sorted(halves.items())}
    adapter = LoraAdapter(path, layers)
    _ = adapter.digest  # here, because adapters are read outside the engine's thread
    return adapter


def _low_rank(file: Path, name: str, pair: dict[str, Tensor], config: "_Config") -> LowRank:
    if len(pair) < 2:
        raise AdapterError(f"{file}: {name} has lora_{next(iter(pair))} only")
    rank, scale = config.rank_and_scale(name)
    for half, dim in (("A", 0), ("B", 1)):
        tensor = pair[half]
        if tensor.dtype not in _DTYPES:
            raise AdapterError(f"{file}: {name}.lora_{half} must be float32, bfloat16 or float16, got {tensor.dtype}")
        if tensor.dim() != 2 or tensor.shape[dim] != rank:
            wanted = f"[{rank}, in]" if half == "A" else f"[out, {rank}]"
            raise AdapterError(f"{file}: {name}.lora_{half} must have the shape {wanted}, got {list(tensor.shape)}")
    return LowRank(name, pair["A"], pair["B"], scale)


class _Config:
    """Settings of ``adapter_config.json``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        fields = JsonFields.read(path, AdapterError)
        self._values = fields.values
        self._refuse_unsupported()
        self._rank = self._positive("r", fields.get("r", int, 8))
        self._alpha = self._finite("lora_alpha", self._values.get("lora_alpha", 8))
        self._over_root = fields.get("use_rslora", bool, False)
        self._ranks = fields.get("rank_pattern", dict, {})
        self._alphas = fields.get("alpha_pattern", dict, {})

    def rank_and_scale(self, module: str) -> tuple[int, float]:
        """Return the rank and scale of a layer; a pattern that matches the end of its name can set its own."""
        rank = self._positive("rank_pattern", self._match(self._ranks, module, self._rank))
        alpha = self._finite("alpha_pattern", self._match(self._alphas, module, self._alpha))
        return rank, alpha / (math.sqrt(rank) if self._over_root else rank)

    def _match(self, patterns: dict[str, Any], module: str, default: Any) -> Any:
        """Return the value of the first pattern that matches a layer, or the default."""
        for pattern, value in patterns.items():
            # PEFT treats these as regular expressions, but an untrusted one can take forever to match.
            if not re.fullmatch(r"\^?[\w.]+\$?", pattern):
                raise AdapterError(f"{self._path}: pattern {pattern!r} is not supported; only names of layers")
            name = pattern.strip("^$")
            if name == f"model.{module}" or (pattern[0] != "^" and f".{module}".endswith(f".{name}")):
                return value
        return default

    def _refuse_unsupported(self) -> None:
        kind = self._values.get("peft_type")
        if kind != "LORA":
            raise AdapterError(f"{self._path}: peft_type must be 'LORA', got {kind!r}")
        bias = self._values.get("bias", "none")
        if bias != "none":
            raise AdapterError(f"{self._path}: bias must be 'none', got {bias!r}")
        start = self._values.get("init_lora_weights")
        if start not in INITIALISATIONS:
            raise AdapterError(
                f"{self._path}: init_lora_weights {start!r} is not supported: it changes the base weights"
            )
        for key, value in self._values.items():
            variant = key.startswith("use_") and key != "use_rslora"  # DoRA and similar variants
            if value and (variant or key in UNSUPPORTED):
                raise AdapterError(f"{self._path}: {key} is not supported, got {value!r:.80}")
        targets = self._values.get("target_modules")
        others = [t for t in targets if str(t).split(".")[-1] not in MODULES] if isinstance(targets, list) else []
        if others:
            raise AdapterError(f"{self._path}: target_modules must be of {', '.join(MODULES)}, got {others!r:.80}")

    def _positive(self, key: str, value: Any) -> int:
        if type(value) is not int or not 1 <= value <= MAX_RANK:
            raise AdapterError(f"{self._path}: {key} must be an integer of 1..{MAX_RANK}, got {value!r:.80}")
        return value

    def _finite(self, key: str, value: Any) -> float:
        if type(value) not in (int, float) or not abs(value) <= 1e6:
            raise AdapterError(f"{self._path}: {key} must be a number of at most 1e6, got {value!r:.80}")
        return float(value)
