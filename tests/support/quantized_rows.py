"""What the tests of row-wise quantised tensors share."""

import torch
from torch import Tensor

from support import reference


def assert_quantized_rows(q: Tensor, scales: Tensor, x: Tensor, slack: float = 2e-6) -> None:
    """``q`` [..., n], int8 or e4m3, and ``scales`` [...] are the fp64 ``x``, rounded to the nearest step of its rows.

    ``slack`` is what fp32 arithmetic may lose, relative to a row's largest: it decides near ties.
    """
    assert q.shape == x.shape
    assert scales.shape == x.shape[:-1]
    assert scales.dtype == torch.float32
    steps, expected = reference.quantize_row(x, q.dtype)
    torch.testing.assert_close(scales.double(), expected, rtol=slack, atol=0)
    if q.dtype == torch.int8:
        assert (q.double() - steps).abs().le(0.5 + 127 * slack).all()
    else:
        half_ulp = torch.ldexp(torch.ones_like(steps), torch.frexp(steps.abs().clamp(min=2.0**-6))[1] - 5)
        assert (q.double() - steps).abs().le(half_ulp + 448 * slack).all()
