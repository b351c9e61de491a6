"""The projections that LoRA adapters change in each kind of layer: their sizes, and which of them a module contains."""

from torch import Tensor

from fastinfer.models.checkpoint import fused_rows, rows_by_head, rows_by_key_head
from fastinfer.models.config import LatentAttentionConfig, ModelConfig
from fastinfer.models.state_config import LinearAttentionConfig, Mamba2Config

# Modules of an adapter that are several weights here: the order of their rows.
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_BY_HEAD = {"query_key_value": ("q_proj", "k_proj", "v_proj")}
# Modules of layers with a state that have the names of attention's in adapters of some families.
_IN_STATES = {
    **{f"{name}_proj": f"in_proj_{name}" for name in ("q", "k", "v")},
    "o_proj": "out_proj",
    "output_gate": "in_proj_z",
}
_BY_KEY_HEAD = {"in_proj_qkvz": ("in_proj_qkv", "in_proj_z"), "in_proj_ba": ("in_proj_b", "in_proj_a")}

Sizes = dict[str, tuple[int, int]]


def module_sizes(config: ModelConfig, layer: int) -> Sizes:
    """Return the numbers of inputs and outputs of a layer's projections, by name."""
    if config.has_state(layer):
        attention = _state_sizes(config)
    elif config.latent_attention is not None:
        attention = _latent_sizes(config, config.latent_attention)
    else:
        attention = _attention_sizes(config, layer)
    output = "out_proj" if config.has_state(layer) else "o_proj"
    attention[output] = config.attention_size(layer), config.hidden_size
    return attention | (_mlp_or_experts(config, layer) if config.has_mlp(layer) else {})


def module_parts(config: ModelConfig, layer: int, module: str, inner: int | None) -> dict[str, slice | Tensor]:
    """Return which projections of a layer a module of an adapter contains, with their rows in it.

    Args:
        config: configuration of the model.
        layer: index of the layer.
        module: name of the module, without that of its owner.
        inner: width of the owner, if that is not the layer's MLP.
    """
    states = config.states
    has_own = isinstance(states, LinearAttentionConfig) and states.separate_projections
    if has_own and config.has_state(layer) and module in _IN_STATES:
        return {_IN_STATES[module]: slice(None)}
    if module in _FUSED:
        return {part: fused_rows(config, layer, part, inner) for part in _FUSED[module]}
    if module in _BY_HEAD and config.num_heads == config.num_kv_heads:
        return {part: rows_by_head(config, layer, part) for part in _BY_HEAD[module]}
    if module in _BY_KEY_HEAD and isinstance(states, LinearAttentionConfig):
        return {part: rows_by_key_head(states, part) for part in _BY_KEY_HEAD[module]}
    if module == "in_proj" and isinstance(states, Mamba2Config):
        wide = states.inner_size + states.conv_dim
        return {"in_proj": slice(0, wide), "in_proj_dt": slice(wide, wide + states.num_heads)}
    if module == "v_proj" and config.value_dim:
        return {"v_proj": config.value_rows(layer)}
    if module == "q_proj" and config.output_gate and not config.separate_gate:
        return {"q_proj": config.query_rows(layer)[0], "output_gate": config.query_rows(layer)[1]}
    return {module: slice(None)}


def _attention_sizes(config: ModelConfig, layer: int) -> Sizes:
    hidden, q_size, kv_size = config.hidden_size, config.q_size(layer), config.kv_size(layer)
    sizes = {"q_proj": (hidden, q_size)}
    if config.kv_layer(layer) == layer:
        sizes["k_proj"] = hidden, kv_size
        if layer not in config.tied_kv_layers:
            sizes["v_proj"] = hidden, kv_size
    if gate_size := config.gate_size(layer):
        sizes["output_gate"] = hidden, gate_size
    return sizes


def _latent_sizes(config: ModelConfig, sizes: LatentAttentionConfig) -> Sizes:
    hidden, q_size, rank = config.hidden_size, config.num_heads * sizes.query_dim, sizes.query_rank
    queries = {"q_a_proj": (hidden, rank), "q_b_proj": (rank, q_size)} if rank else {"q_proj": (hidden, q_size)}
    # Matrices of keys and values are those of each head, and those of keys are transposed, as they are applied.
    heads = {"heads.keys": (sizes.plain_dim, sizes.rank), "heads.values": (sizes.rank, sizes.value_dim)}
    gates = {"output_gate": (hidden, config.num_heads)} if config.head_gate else {}
    return queries | {"kv_a_proj": (hidden, sizes.row_dim)} | gates | heads


def _state_sizes(config: ModelConfig) -> Sizes:
    hidden, states = config.hidden_size, config.states
    assert states is not None
    second: Sizes = {}
    if isinstance(states, LinearAttentionConfig):
        rows, second = states.qkv_sizes | states.other_sizes, states.second_sizes
    elif isinstance(states, Mamba2Config):
        rows = {"in_proj": states.inner_size + states.conv_dim, "in_proj_dt": states.num_heads}
    else:
        rows = {"in_proj": 3 * states.conv_dim}
    return {name: (hidden, size) for name, size in rows.items()} | second


def _mlp_or_experts(config: ModelConfig, layer: int) -> Sizes:
    hidden = config.hidden_size
    if not config.has_experts(layer):
        return _mlp_sizes(config, config.mlp_size(layer))
    experts = _mlp_sizes(config, config.intermediate_size, config.expert_width)
    sizes = {"router": (hidden, config.num_experts)} | {f"experts.{name}": size for name, size in experts.items()}
    if width := config.shared_intermediate_size:
        sizes |= {f"shared_expert.{name}": size for name, size in _mlp_sizes(config, width).items()}
    if config.shared_expert_gate:
        sizes["shared_expert_gate"] = (hidden, 1)
    if config.mlp_beside_experts:
        sizes |= _mlp_sizes(config, config.dense_intermediate_size)
    return sizes


def _mlp_sizes(config: ModelConfig, inner: int, width: int | None = None) -> Sizes:
    width = width or config.hidden_size
    gate = {"gate_proj": (width, inner)} if config.gated else {}
    return gate | {"up_proj": (width, inner), "down_proj": (inner, width)}
