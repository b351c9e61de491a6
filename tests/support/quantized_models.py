"""Random models whose matrices are quantised as other programs do it, beside the numbers that this leaves.

Each packer takes a matrix [out, in] and returns its tensors by suffix, and the fp32 numbers for which they stand.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from support.families import make_model
from support.packed_layers import pack_rows

Packed = tuple[dict[str, Tensor], Tensor]
Packer = Callable[[Tensor], Packed]


def mlx(bits: int, group_size: int) -> Packer:
    """Integers with a scale and a bias per group, from the smallest number to the largest."""

    def pack(weight: Tensor) -> Packed:
        groups = weight.unflatten(1, (-1, group_size))
        low, high = groups.amin(-1, keepdim=True).half(), groups.amax(-1, keepdim=True).half()
        scales = ((high - low).float() / (2**bits - 1)).half()
        q = ((groups - low) / scales.float()).nan_to_num(0.0).round().clamp(0, 2**bits - 1)
        words = pack_rows(q.flatten(1).long(), bits).view(torch.uint32)
        tensors = {"weight": words, "scales": scales[..., 0], "biases": low[..., 0]}
        return tensors, (q * scales.float() + low.float()).flatten(1)

    return pack


def mlx_float(mode: str) -> Packer:
    """Numbers in fp4 or fp8; scales are bytes."""

    def pack(weight: Tensor) -> Packed:
        if mode == "mxfp8":
            groups = weight.unflatten(1, (-1, 32))
            scales = 2 ** (groups.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 448).log2().ceil()
            numbers = (groups / scales).to(torch.float8_e4m3fn)
            meant = (numbers.float() * scales).flatten(1)
            packed, stored = numbers.flatten(1), (scales[..., 0].log2() + 127).byte()
        elif mode == "mxfp4":
            tensors, meant = mxfp4(weight)
            packed, stored = tensors["weight_packed"], tensors["weight_scale"]
        else:
            packed, scales, meant = fp4(weight, 16, lambda largest: (largest / 6).to(torch.float8_e4m3fn).float())
            stored = scales.to(torch.float8_e4m3fn)
        return {"weight": packed.contiguous().view(torch.uint32), "scales": stored.view(torch.uint8)}, meant

    return pack


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def fp8(block: tuple[int, int] | None, scale_name: str, scale_shape: tuple[int, ...] = ()) -> Packer:
    """e4m3 with a scale for each block, the last of which may be cut; without a block one for all."""

    def pack(weight: Tensor) -> Packed:
        rows, columns = block or weight.shape
        scales = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
        numbers, meant = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                part = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
                scales[i, j] = weight[part].abs().max().clamp(min=1e-6) / 448
                numbers[part] = (weight[part] / scales[i, j]).to(torch.float8_e4m3fn)
                meant[part] = numbers[part].float() * scales[i, j]
        return {"weight": numbers, scale_name: scales if block else scales.reshape(scale_shape)}, meant

    return pack


def fp8_by_output(scale_name: str) -> Packer:
    """e4m3 with a scale per output, [out, 1]."""

    def pack(weight: Tensor) -> Packed:
        return fp8((1, weight.shape[1]), scale_name)(weight)

    return pack


def fp4(weight: Tensor, group_size: int, scale_of: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Bytes of two numbers, the scales that ``scale_of`` makes of a group's largest number, and what both stand for."""
    groups = weight.unflatten(1, (-1, group_size))
    scales = scale_of(groups.abs().amax(-1))
    numbers = groups / scales[..., None].clamp(min=1e-30)
    places = (numbers[..., None] - E2M1).abs().argmin(-1)
    flat = places.flatten(1)
    return (flat[:, 0::2] | flat[:, 1::2] << 4).byte(), scales, (E2M1[places] * scales[..., None]).flatten(1)


def nvfp4(modelopt: bool) -> Packer:
    """e2m1 with a scale in e4m3 per 16 inputs, and a factor for all, by which Model Optimizer multiplies."""

    def pack(weight: Tensor) -> Packed:
        factor = weight.abs().max() / (6 * 448)
        stored: list[Tensor] = []

        def scale_of(largest: Tensor) -> Tensor:
            stored.append((largest / 6 / factor).to(torch.float8_e4m3fn))
            return stored[0].float() * factor

        packed, _, meant = fp4(weight, 16, scale_of)
        if modelopt:
            others = {"weight_scale": stored[0], "weight_scale_2": factor, "input_scale": torch.tensor(0.5)}
            return {"weight": packed, **others}, meant
        return {"weight_packed": packed, "weight_scale": stored[0], "weight_global_scale": 1 / factor[None]}, meant

    return pack


def mxfp4(weight: Tensor) -> Packed:
    """e2m1 with a power of two per 32 inputs."""
    packed, scales, meant = fp4(weight, 32, lambda largest: 2.0 ** (largest.clamp(min=1e-4) / 6).log2().ceil())
    return {"weight_packed": packed, "weight_scale": (scales.log2() + 127).byte()}, meant


def gptq(bits: int, group_size: int, stored_zero: int) -> Packer:
    """Integers with a zero point; ``stored_zero`` is the number that is stored for the zero point 0."""

    def pack(weight: Tensor) -> Packed:
        groups = weight.unflatten(1, (-1, group_size))
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        scales = ((high - low) / (2**bits - 1)).clamp(min=1e-6).half().float()
        zeros = (-low / scales).round().clamp(0, 2**bits - 1)
        q = (groups / scales + zeros).round().clamp(0, 2**bits - 1)
        stored = (zeros[..., 0].long() + stored_zero) % 2**bits
        tensors = {
            "qweight": pack_rows(q.flatten(1).long(), bits).t(),
            "qzeros": pack_rows(stored.t(), bits),
            "scales": scales[..., 0].t().half(),
        }
        return tensors, ((q - zeros) * scales).flatten(1)

    return pack


def save_quantized_model(folder: Path, family: str, pack: Callable[[str], Packer | None], **config: Any) -> Any:
    """Write a model some of whose matrices are packed; returns transformers' model of the numbers they stand for.

    Args:
        folder: folder to write to, without the quantised model's own settings.
        family: one of :data:`support.families.FAMILIES`.
        pack: for the name of a module, the packer of its matrix; None for one that stays as it is.
        config: sizes of the model that differ from the family's.
    """
    model = make_model(family, **({} if family == "gpt2" else {"hidden_size": 128, "intermediate_size": 192} | config))
    model.save_pretrained(folder)
    stored, numbers = {}, {}
    for name, values in load_file(folder / "model.safetensors").items():
        module, _, part = name.rpartition(".")
        packer = pack(module) if part == "weight" and values.dim() == 2 else None
        packed, meant = ({part: values}, values) if packer is None else packer(values)
        stored |= {f"{module}.{suffix}": tensor.contiguous() for suffix, tensor in packed.items()}
        numbers[name] = meant
    save_file(numbers, folder / "model.safetensors", {"format": "pt"})
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return reference


def edit_config(folder: Path, **changes: Any) -> None:
    """Set values of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
