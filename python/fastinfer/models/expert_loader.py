"""Reading of the experts of one layer."""

import torch

from fastinfer.errors import UnsupportedModelError
from fastinfer.models.checkpoint import Checkpoint
from fastinfer.models.gate_up_loader import input_names, read_gate_up_bias, read_input
from fastinfer.models.layer_reader import LayerReader
from fastinfer.models.moe import ExpertLatents, MixtureOfExperts, SharedExpert
from fastinfer.models.norm import Norm, RMSNorm, factor_norm
from fastinfer.weights.weight import Weight

# Limits of fastinfer.ops.route_experts.
MAX_EXPERTS, MAX_EXPERTS_PER_TOKEN, MAX_EXPERT_GROUPS = 1024, 32, 32


def check_experts(checkpoint: Checkpoint) -> None:
    """Refuse numbers and groups of experts from which :func:`fastinfer.ops.route_experts` cannot choose."""
    config = checkpoint.config
    groups, experts = config.router.num_groups, config.num_experts
    if experts > MAX_EXPERTS or config.experts_per_token > MAX_EXPERTS_PER_TOKEN:
        raise UnsupportedModelError(
            f"{checkpoint.path}: expected at most {MAX_EXPERTS} experts and {MAX_EXPERTS_PER_TOKEN} per token, "
            f"got {experts} and {config.experts_per_token}"
        )
    if groups == 1:
        return
    if groups > MAX_EXPERT_GROUPS or experts % groups or experts // groups < 2:
        raise UnsupportedModelError(
            f"{checkpoint.path}: expected at most {MAX_EXPERT_GROUPS} groups that divide the {experts} experts into "
            f"two or more each, got {groups}"
        )
    most = config.router.top_groups * (experts // groups)
    if config.experts_per_token > most:
        raise UnsupportedModelError(
            f"{checkpoint.path}: expected at most {most} experts per token, which the chosen groups have, "
            f"got {config.experts_per_token}"
        )


def load_mixture(reader: LayerReader, index: int, norm: Norm, post_norm: RMSNorm | None) -> MixtureOfExperts:
    """Read the experts of a layer between two norms, of which the second one may be missing."""
    config, checkpoint, layer = reader.config, reader.checkpoint, f"layers.{index}"
    if config.experts_scale != 1.0:
        assert post_norm is None
        post_norm = factor_norm(config.experts_scale, config.hidden_size, reader.device)
    experts = [f"{layer}.experts.{number}" for number in reader.own_experts()]
    shape = width, inner = config.expert_width, config.intermediate_size
    router = checkpoint.linear(f"{layer}.router", config.num_experts, config.hidden_size)
    router_bias = gate_up_bias = down_bias = None
    if config.mlp_bias:
        router_bias = reader.vector(f"{layer}.router.bias", config.num_experts)
        gate_up_bias = torch.stack([read_gate_up_bias(reader, expert, inner) for expert in experts])
        down_bias = torch.stack([reader.vector(f"{expert}.down_proj.bias", width) for expert in experts])
    return MixtureOfExperts(
        norm=norm,
        # A small error could make the router choose another expert, so its input is not quantised.
        router=reader.make(router, 32, router_bias),
        gate_up=reader.experts(
            [tuple(f"{expert}.{name}" for name in input_names(config)) for expert in experts],
            [read_input(reader, expert, inner, width) for expert in experts],
            gate_up_bias,
        ),
        down=reader.experts(
            [(f"{expert}.down_proj",) for expert in experts],
            [checkpoint.linear(f"{expert}.down_proj", *shape) for expert in experts],
            down_bias,
        ),
        top_k=config.experts_per_token,
        routing=config.router,
        activation=config.activation,
        choice_bias=reader.vector(f"{layer}.router_bias", config.num_experts) if config.router.has_bias else None,
        shared=_shared_expert(reader, index) if config.shared_intermediate_size else None,
        latents=_expert_latents(reader, layer) if config.expert_latent_size else None,
        post_norm=post_norm,
        gated=config.gated,
        limit=config.swiglu_limit(index),
        experts_device=reader.experts_device,
    )


def _expert_latents(reader: LayerReader, layer: str) -> ExpertLatents:
    hidden, width = reader.config.hidden_size, reader.config.expert_latent_size

    def weight(name: str, out_features: int, in_features: int) -> Weight:
        return reader.weight((name,), reader.checkpoint.linear(name, out_features, in_features), None)

    return ExpertLatents(
        weight(f"{layer}.experts_input", width, hidden), weight(f"{layer}.experts_output", hidden, width)
    )


def _shared_expert(reader: LayerReader, index: int) -> SharedExpert:
    config, layer = reader.config, f"layers.{index}"
    owner = f"{layer}.shared_expert"
    inner, hidden = config.shared_intermediate_size, config.hidden_size
    token_gate = None
    if config.shared_expert_gate:
        gate = reader.checkpoint.linear(f"{layer}.shared_expert_gate", 1, hidden)
        token_gate = reader.make(gate, 32)
    down = reader.checkpoint.linear(f"{owner}.down_proj", hidden, inner)
    names = tuple(f"{owner}.{name}" for name in input_names(config))
    return SharedExpert(
        gate_up=reader.weight(names, read_input(reader, owner, inner), None),
        down=reader.weight((f"{owner}.down_proj",), down, None),
        token_gate=token_gate,
        activation=config.activation,
        gated=config.gated,
        limit=config.shared_swiglu_limit(index),
    )
