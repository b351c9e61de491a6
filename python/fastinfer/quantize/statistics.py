"""Statistics of a linear layer's inputs, collected during calibration."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class InputStatistics:
    """Statistics over the calibration tokens that entered a layer.

    Attributes:
        hessian: [in_features, in_features] fp32, mean of ``x x^T``. A change D of the weight causes a squared error of
            the output of ``trace(D hessian D^T)`` per token.
        mean_abs: [in_features] fp32, mean magnitude.
        max_abs: [in_features] fp32, largest magnitude.
    """

    hessian: Tensor
    mean_abs: Tensor
    max_abs: Tensor

    @classmethod
    def of(cls, x: Tensor) -> "InputStatistics":
        """Compute the statistics of inputs [tokens, in_features] fp32."""
        magnitudes = x.abs()
        return cls((x.T @ x).div_(len(x)), magnitudes.mean(0), magnitudes.amax(0))

    def output_error(self, change: Tensor) -> float:
        """Return the mean squared error of the output, summed over its features.

        Args:
            change: [rows, in_features] fp32, the change of the weight that causes the error.
        """
        return float((change @ self.hessian).mul_(change).sum())

    def scaled(self, scales: Tensor) -> "InputStatistics":
        """Return the statistics of the inputs divided by ``scales`` [in_features]."""
        hessian = (self.hessian / scales).div_(scales[:, None])
        return InputStatistics(hessian, self.mean_abs / scales, self.max_abs / scales)
