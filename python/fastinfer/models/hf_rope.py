"""Rotary settings, from ``config.json``."""

import math

from fastinfer import ops
from fastinfer.errors import CheckpointFormatError, UnsupportedModelError
from fastinfer.formats.json_fields import JsonFields
from fastinfer.models.config import MAX_SIZE, LatentAttentionConfig
from fastinfer.models.families import Family
from fastinfer.models.hf_fields import require
from fastinfer.models.structure import GEMMA4, LFM3


class Rope:
    """Rotary settings, for all layers or separately for those with and without a window.

    They also say how queries grow with their position, and with latent attention the scale of the logits.
    """

    def __init__(
        self,
        fields: JsonFields,
        family: Family,
        head_dim: int,
        *,
        has_windows: bool,
        latent: LatentAttentionConfig | None = None,
    ) -> None:
        self._has_growth, self.query_growth, self.query_length = family.query_growth, 0.0, 1
        self.attention_scale = None if latent is None else latent.query_dim**-0.5
        self.max_position = fields.get("max_position_embeddings", int, minimum=1, maximum=MAX_SIZE)
        if family.structure in (GEMMA4, LFM3):  # whose settings are read later
            self.dim, self.theta, self.local_theta, self.scaling = head_dim, 10000.0, None, ops.RopeScaling()
            self.local_dim = 0
            return
        key, parameters = _rotary_fields(fields)
        full = parameters.object("full_attention") if parameters else None
        local = parameters.object("sliding_attention") if parameters else None
        self._by_kind = bool(full or local)
        if self._by_kind:  # separate for the two kinds of layers
            if full is None:
                raise CheckpointFormatError(f"{fields.path}: {key}.full_attention is missing")
            parameters = full
        self._has_alpha = family.rope_alpha
        theta = fields.get("rope_theta", float, 10000.0, minimum=1.001)
        self.theta = parameters.get("rope_theta", float, theta, minimum=1.001) if parameters else theta
        self.local_theta = fields.get("rope_local_base_freq", float, None, minimum=1.001)
        if local:
            require(local, "rope_type", "default")
            self.local_theta = local.get("rope_theta", float, minimum=1.001)
        share = fields.get("partial_rotary_factor", float, 1.0, minimum=0.0, maximum=1.0)
        if parameters:
            share = parameters.get("partial_rotary_factor", float, share, minimum=0.0, maximum=1.0)
        if latent is not None:
            _check_rotated_share(fields, share, latent)
            head_dim, share = latent.rotary_dim, 1.0
        self.dim = fields.get("rotary_dim", int, int(head_dim * share), minimum=0, maximum=head_dim)
        self.local_dim = self.dim
        if local:
            self.local_dim = int(head_dim * local.get("partial_rotary_factor", float, share, minimum=0.0, maximum=1.0))
        for size in (self.dim, self.local_dim):
            if size % 2 or not size:
                raise CheckpointFormatError(f"{fields.path}: the rotated size must be even and positive, got {size}")
        self.scaling = ops.RopeScaling() if parameters is None else self._scaling(fields, parameters)
        if family.structure.only_full_scaled and has_windows and self.local_theta is None:
            self.local_theta = self.theta

    def by_layer(self, fields: JsonFields, windows: tuple[int, ...], num_layers: int) -> frozenset[int]:
        """Set the bases from a list with one for each layer, and return the layers that are not rotated, with base 0.

        Layers with a window must have one base, and so must those without.
        """
        key = "layer_rope_theta"
        thetas = fields.numbers(key, num_layers) if fields.values.get(key) is not None else (self.theta,) * num_layers
        if any(0 != theta < 1.001 for theta in thetas):
            raise CheckpointFormatError(f"{fields.path}: {key}: expected 0, or numbers above 1, got {thetas!r:.80}")
        full, local = (
            {theta for layer, theta in enumerate(thetas) if theta and bool(windows and windows[layer]) == has_window}
            for has_window in (False, True)
        )
        if len(full) > 1 or len(local) > 1 or (self.scaling != ops.RopeScaling() and len(full | local) > 1):
            raise UnsupportedModelError(
                f"{fields.path}: {key} must be one number for all layers with a window and one for all others, which "
                f"are equal with a rotary scaling, got {thetas!r:.80}"
            )
        self.theta = next(iter(full or local), self.theta)
        self.local_theta = next(iter(local)) if local and local != {self.theta} else None
        return frozenset(layer for layer, theta in enumerate(thetas) if not theta)

    def _scaling(self, fields: JsonFields, scaling: JsonFields) -> ops.RopeScaling:
        kind = scaling.get("rope_type", str, None) or scaling.get("type", str, "default")
        positions = self.max_position
        if self._has_growth:
            self.query_growth = scaling.get("llama_4_scaling_beta", float, 0.0, minimum=0.0)
        if self.query_growth:
            self.query_length = scaling.get("original_max_position_embeddings", int, minimum=1, maximum=MAX_SIZE)
        if kind == "dynamic" and self._has_alpha and scaling.values.get("alpha"):
            return ops.RopeScaling("ntk", factor=scaling.get("alpha", float, minimum=1e-3))
        # With text alone a token has the same position in all dimensions of mrope.
        if kind in ("default", "none", "mrope"):
            return ops.RopeScaling()
        trained = positions
        for source in (fields, scaling) if self._by_kind else (scaling, fields):  # the last that has it counts
            trained = source.get("original_max_position_embeddings", int, trained, minimum=1, maximum=MAX_SIZE)
        attention_factor = scaling.get("attention_factor", float, None, minimum=0.0)
        if kind in ("longrope", "su"):
            half = self.dim // 2
            if trained < 2:  # its logarithm is a divisor
                raise CheckpointFormatError(
                    f"{fields.path}: original_max_position_embeddings: expected at least 2, got {trained}"
                )
            return ops.RopeScaling(
                kind="longrope",
                factor=scaling.get("factor", float, positions / trained, minimum=1e-3),
                original_max_position=trained,
                attention_factor=attention_factor,
                short_factors=scaling.numbers("short_factor", half),
                long_factors=scaling.numbers("long_factor", half),
            )
        if kind not in ("linear", "llama3", "yarn"):
            raise UnsupportedModelError(
                f"{fields.path}: rotary scaling {kind!r} is not implemented; "
                "supported are linear, llama3, longrope, yarn"
            )
        factor = scaling.get("factor", float, minimum=1e-3)
        if self.attention_scale is not None:
            self.attention_scale *= _yarn_magnitude(factor, scaling.get("mscale_all_dim", float, 0.0, minimum=0.0)) ** 2
        if kind == "yarn" and attention_factor is None:
            attention_factor = _yarn_attention_factor(scaling, factor)
        return ops.RopeScaling(
            kind=kind,
            factor=factor,
            original_max_position=0 if kind == "linear" else trained,
            low_freq_factor=scaling.get("low_freq_factor", float, 1.0, minimum=1e-3),
            high_freq_factor=scaling.get("high_freq_factor", float, 4.0, minimum=1e-3),
            beta_fast=scaling.get("beta_fast", float, 32.0, minimum=1e-3),
            beta_slow=scaling.get("beta_slow", float, 1.0, minimum=1e-3),
            attention_factor=attention_factor,
            truncate=scaling.get("truncate", bool, True),
        )


def proportional_rope(fields: JsonFields, default: dict[str, object], head_dim: int) -> tuple[float, ops.RopeScaling]:
    """Return the base and the scaling of layers without a window whose rotated share is proportional.

    Args:
        fields: fields of config.json, which may have settings for each kind of layer.
        default: settings where there are none.
        head_dim: number of elements of a head.
    """
    settings = _settings_of(fields, "full_attention", default)
    share = settings.get("partial_rotary_factor", float, 1.0, minimum=0.0, maximum=1.0)
    factor = settings.get("factor", float, 1.0, minimum=1e-3)
    scaling = ops.RopeScaling("proportional", factor=factor, num_rotated=2 * int(share * head_dim // 2))
    return settings.get("rope_theta", float, minimum=1.001), scaling


def local_theta(fields: JsonFields, default: dict[str, object]) -> float:
    """Return the base of layers with a window, as :func:`proportional_rope` does."""
    return _settings_of(fields, "sliding_attention", default).get("rope_theta", float, minimum=1.001)


def _rotary_fields(fields: JsonFields) -> tuple[str, JsonFields | None]:
    """Return the name of the rotary settings, the older one first, and the settings, if there are any."""
    key = "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"
    return key, fields.object(key)


def _settings_of(fields: JsonFields, kind: str, default: dict[str, object]) -> JsonFields:
    """Return the rotary settings of a kind of layer, of the only type that such layers have."""
    key, parameters = _rotary_fields(fields)
    if parameters is not None and not all(isinstance(value, dict) for value in parameters.values.values()):
        raise UnsupportedModelError(
            f"{fields.path}: {key} must be for each kind of layer, got {parameters.values!r:.80}"
        )
    settings = None if parameters is None else parameters.object(kind)
    if settings is None:
        settings = JsonFields(fields.path, default, fields.error)
    expected, got = default["rope_type"], settings.get("rope_type", str, "default")
    if got != expected:
        raise UnsupportedModelError(f"{fields.path}: rope_type must be {expected!r} for {kind}, got {got!r:.80}")
    return settings


def _yarn_attention_factor(scaling: JsonFields, factor: float) -> float | None:
    """Return the quotient of DeepSeek's two factors on cos and sin; ``None`` if the file does not have both."""
    both = [scaling.get(key, float, None, minimum=0.0) for key in ("mscale", "mscale_all_dim")]
    if not all(both):
        return None
    over, under = (_yarn_magnitude(factor, scale or 0.0) for scale in both)
    return over / under


def _yarn_magnitude(factor: float, scale: float) -> float:
    """Return the factor that DeepSeek's YaRN gives vectors for an ``mscale``."""
    return 0.1 * scale * math.log(max(factor, 1.0)) + 1.0


def _check_rotated_share(fields: JsonFields, share: float, latent: LatentAttentionConfig) -> None:
    """Refuse a share that is neither all of the elements that are rotated nor their part of a query."""
    known = 1.0, latent.rotary_dim / latent.query_dim
    if not any(math.isclose(share, value, rel_tol=1e-6) for value in known):
        raise UnsupportedModelError(
            f"{fields.path}: partial_rotary_factor must be 1 or qk_rope_head_dim's part of a query, {known[1]}, "
            f"got {share}"
        )
