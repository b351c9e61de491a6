"""Report of a quantisation: the error of each layer, and the size and perplexity of the model."""

from dataclasses import asdict, dataclass, field
from typing import Any

from fastinfer.utils.finite_json import finite_json
from fastinfer.utils.table import format_table


@dataclass
class Report:
    """Figures of one quantisation.

    Attributes:
        method: name and numbers of the method.
        errors_of: what the errors are of: ``"outputs"`` on the calibration text, or the ``"weights"`` themselves.
        errors: relative errors in the Frobenius norm, by the names of the modules that share a weight.
        bytes_before, bytes_after: sizes of the weight files.
        perplexity_before, perplexity_after: perplexity on the evaluation text in fp32; ``None`` without such a text.
    """

    method: dict[str, Any]
    errors_of: str
    errors: dict[str, float] = field(default_factory=dict)
    bytes_before: int = 0
    bytes_after: int = 0
    perplexity_before: float | None = None
    perplexity_after: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the figures as JSON values, ``None`` for a number that is not finite."""
        values: dict[str, Any] = finite_json(asdict(self))
        return values

    def __str__(self) -> str:
        rows = [["layer", f"relative error of {self.errors_of}"]]
        rows += [[name, f"{error:.2e}"] for name, error in self.errors.items()]
        lines = [format_table(rows), "", f"size        {_mib(self.bytes_before)} to {_mib(self.bytes_after)}"]
        if self.perplexity_before is not None and self.perplexity_after is not None:
            change = self.perplexity_after / self.perplexity_before - 1
            lines.append(f"perplexity  {self.perplexity_before:.3f} to {self.perplexity_after:.3f} ({change:+.2%})")
        return "\n".join(lines)


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
