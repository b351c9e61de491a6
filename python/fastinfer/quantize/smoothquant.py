"""SmoothQuant (Xiao et al., 2022, https://arxiv.org/abs/2211.10438): moves outliers of the inputs into the weights."""

from torch import Tensor

from fastinfer.quantize.statistics import InputStatistics


def smoothing_scales(values: Tensor, statistics: InputStatistics, strength: float = 0.5) -> Tensor:
    """Return the factors that divide the inputs and multiply the columns of their weight, [in_features] fp32.

    Args:
        values: [rows, in_features] fp32, the weight.
        statistics: statistics of its inputs.
        strength: the paper's migration strength, 0 .. 1; larger values move more of the outliers into the weight.
    """
    inputs = statistics.max_abs.clamp(min=1e-5)
    weights = values.abs().amax(0).clamp(min=1e-5)
    return (inputs**strength / weights ** (1 - strength)).clamp(min=1e-5)
