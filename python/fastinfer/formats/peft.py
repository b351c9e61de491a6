"""Reader of LoRA adapters as PEFT saves them: ``adapter_config.json`` beside ``adapter_model.safetensors``.

Format: https://huggingface.co/docs/peft/developer_guides/checkpoint. A pickled ``adapter_model.bin`` is refused,
because it can run any code. An adapter with unsupported parts is refused as a whole, because applying only the
supported parts would give a model that nobody has trained.
"""

import hashlib
import math
import os
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
from fastinfer.formats.peft_names import FUSED_EXPERTS, TARGETS, AdapterModule, is_base_weight, parse_tensor
from fastinfer.utils.checks import show_path
from fastinfer.utils.regular_file import check_regular

MAX_RANK = 2**16

# Settings that must be absent, empty or false, because they change the meaning of the matrices.
UNSUPPORTED = (
    "alora_invocation_tokens",
    "arrow_config",
    "ensure_weight_tying",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "megatron_config",
    "modules_to_save",
    "monteclora_config",
    "trainable_token_indices",
    "velora_config",
)
# Initialisations that do not change the base weights.
INITIALISATIONS = (None, True, False, "gaussian", "eva", "orthogonal")

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
        weights: updates by the project's name of the weight, see :mod:`fastinfer.formats.peft_names`.
    """

    path: Path
    weights: dict[str, LowRank]

    @property
    def max_rank(self) -> int:
        """Largest rank of all updates."""
        return max(low_rank.rank for low_rank in self.weights.values())

    @cached_property
    def digest(self) -> str:
        """Hash of all updates: equal for adapters that compute the same, in any process."""
        digest = hashlib.sha256()
        for name, low_rank in sorted(self.weights.items()):
            matrices = low_rank.a.contiguous(), low_rank.b.contiguous()
            digest.update(repr((name, low_rank.scale, [(m.dtype, m.shape) for m in matrices])).encode())
            for matrix in matrices:
                digest.update(matrix.view(torch.uint8).numpy().data)
        return digest.hexdigest()


def read_adapter(path: Path) -> LoraAdapter:
    """Read the folder of an adapter.

    Raises:
        AdapterError: a file is missing or damaged, or the adapter needs something that is not implemented: a bias,
            DoRA, saved modules or embeddings, modules other than ``TARGETS``, or an initialisation that changes the
            base weights.
    """
    if not os.path.isdir(path):
        raise AdapterError(f"adapter: expected a folder that PEFT has saved, got {show_path(path)}")
    config = _Config(path / "adapter_config.json")
    file = path / "adapter_model.safetensors"
    if not file.exists():
        pickled = " (adapter_model.bin is a pickle, which can run any code: save the adapter as safetensors)"
        raise AdapterError(f"{file}: no such file" + (pickled if (path / "adapter_model.bin").exists() else ""))
    halves: dict[AdapterModule, dict[str, Tensor]] = {}
    try:
        check_regular(file)
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (not a dictionary)
                if is_base_weight(name):
                    continue
                parsed = parse_tensor(name)
                if parsed is None:
                    raise AdapterError(
                        f"{file}: tensor {name!r} is not supported; only A and B of {', '.join(TARGETS)}"
                    )
                half = tensors.get_tensor(name).clone()  # or the file stays mapped
                halves.setdefault(parsed[0], {})[parsed[1]] = half
    except OSError as error:
        raise AdapterError(f"{file}: {error.strerror or error}") from None
    except SafetensorError as error:
        raise AdapterError(f"{file}: not a valid safetensors file: {error}") from error
    weights: dict[str, LowRank] = {}
    for module, pair in sorted(halves.items(), key=lambda item: item[0].name):
        if len(pair) < 2:
            raise AdapterError(f"{file}: {module.name} has lora_{next(iter(pair))} only")
        if module.depth is None:
            updates = _of_linear(file, module, pair, config)
        else:
            updates = _of_experts(file, module, module.depth, pair, config)
        if twice := weights.keys() & updates.keys():
            raise AdapterError(f"{file}: {module.name} and {weights[min(twice)].name} are the same weight of the model")
        weights |= updates
    if not weights:
        raise AdapterError(f"{file}: no tensors")
    return LoraAdapter(path, weights)


def _of_linear(file: Path, module: AdapterModule, pair: dict[str, Tensor], config: "_Config") -> dict[str, LowRank]:
    """Return the update of a linear layer."""
    rank, scale = config.rank_and_scale(config.parameter(module.name))
    _check_halves(file, module.name, pair, rank)
    return {module.weight: LowRank(module.name, pair["A"], pair["B"], scale)}


def _of_experts(
    file: Path, module: AdapterModule, depth: int, pair: dict[str, Tensor], config: "_Config"
) -> dict[str, LowRank]:
    """Return the updates of all experts from a tensor of ``target_parameters``.

    A is [experts * rank, in_features], and B [out_features, rank * experts], where the experts are next to each other.
    """
    targeted = [name for name in reversed(FUSED_EXPERTS) if config.targets(f"{module.name}.{name}")]
    if depth >= len(targeted):
        raise AdapterError(
            f"{file}: {module.name} must have one pair of tensors for each of {', '.join(FUSED_EXPERTS)} in "
            f"target_parameters, got more"
        )
    name = f"{module.name}.{targeted[depth]}"
    rank, scale = config.rank_and_scale(name)
    rows = pair["A"].shape[0] if pair["A"].dim() else 0
    if rows % rank or not rows:
        raise AdapterError(f"{file}: {name}.lora_A must have a multiple of {rank} rows, got {list(pair['A'].shape)}")
    _check_halves(file, name, pair, rows)
    num_experts = rows // rank
    a = pair["A"].reshape(num_experts, rank, pair["A"].shape[1])
    b = pair["B"].reshape(pair["B"].shape[0], rank, num_experts)
    return {
        f"{module.weight}.{expert}.{targeted[depth]}": LowRank(name, a[expert], b[:, :, expert], scale)
        for expert in range(num_experts)
    }


def _check_halves(file: Path, name: str, pair: dict[str, Tensor], rank: int) -> None:
    """Check dtypes and shapes of A and B."""
    for half, dim in (("A", 0), ("B", 1)):
        tensor = pair[half]
        if tensor.dtype not in _DTYPES:
            raise AdapterError(f"{file}: {name}.lora_{half} must be float32, bfloat16 or float16, got {tensor.dtype}")
        if tensor.dim() != 2 or tensor.shape[dim] != rank:
            wanted = f"[{rank}, in]" if half == "A" else f"[out, {rank}]"
            raise AdapterError(f"{file}: {name}.lora_{half} must have the shape {wanted}, got {list(tensor.shape)}")


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
        parameters = self._values.get("target_parameters") or []
        known = (*FUSED_EXPERTS, "weight")
        if not isinstance(parameters, list) or any(str(name).rpartition(".")[2] not in known for name in parameters):
            raise AdapterError(
                f"{path}: target_parameters must be a list of {', '.join(known)}, got {parameters!r:.80}"
            )
        self._parameters = tuple(f".{name}" for name in parameters)

    def targets(self, parameter: str) -> bool:
        """Return whether ``target_parameters`` has a parameter of the model."""
        return f".{parameter}".endswith(self._parameters)

    def parameter(self, module: str) -> str:
        """Return the name by which PEFT looks up a module's rank: that of its weight if the weight was targeted."""
        return f"{module}.weight" if self.targets(f"{module}.weight") else module

    def rank_and_scale(self, name: str) -> tuple[int, float]:
        """Return the rank and scale of a layer; a pattern that matches the end of its name can set its own."""
        rank = self._positive("rank_pattern", self._match(self._ranks, name, self._rank))
        alpha = self._finite("alpha_pattern", self._match(self._alphas, name, self._alpha))
        return rank, alpha / (math.sqrt(rank) if self._over_root else rank)

    def _match(self, patterns: dict[str, Any], name: str, default: Any) -> Any:
        """Return the value of the first pattern that matches a layer, or the default."""
        for pattern, value in patterns.items():
            # PEFT treats these as regular expressions, but an untrusted one can take forever to match. PEFT itself
            # writes ".*\.name" for the experts of an older model.
            if not re.fullmatch(r"(\^|\.\*\\\.)?[\w.]+\$?", pattern):
                raise AdapterError(f"{self._path}: pattern {pattern!r} is not supported; only names of layers")
            end = pattern.removeprefix(".*\\.").strip("^$")
            if end == name or (pattern[0] != "^" and name.endswith(f".{end}")):
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
        others = [t for t in targets if str(t).split(".")[-1] not in TARGETS] if isinstance(targets, list) else []
        if others:
            raise AdapterError(f"{self._path}: target_modules must be of {', '.join(TARGETS)}, got {others!r:.80}")

    def _positive(self, key: str, value: Any) -> int:
        if type(value) is not int or not 1 <= value <= MAX_RANK:
            raise AdapterError(f"{self._path}: {key} must be an integer of 1..{MAX_RANK}, got {value!r:.80}")
        return value

    def _finite(self, key: str, value: Any) -> float:
        if type(value) not in (int, float) or not abs(value) <= 1e6:
            raise AdapterError(f"{self._path}: {key} must be a number of at most 1e6, got {value!r:.80}")
        return float(value)
