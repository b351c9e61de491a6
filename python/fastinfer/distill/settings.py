"""Settings of a run. Importing this module does not import torch, so that the command line can check them at once."""

from dataclasses import dataclass

from fastinfer.errors import RequestError

# "ce" is the cross entropy of the text itself, for which no teacher is needed.
LOSSES = ("logit", "hidden", "attention", "ce")
DIVERGENCES = ("fkl", "rkl", "jsd", "lk")
# Divergences that depend on where the student is wrong beyond the teacher's likeliest tokens. Of the cut SmolLM2, the
# gradients of "rkl" and "lk" from the 64 likeliest have cosines of .97 to .98 with those from whole distributions. So
# the teacher's last hidden states are recorded for them, from which these follow.
WHOLE = ("rkl", "lk")
# For "fkl" that cosine was .988 on one text, and with 128 tokens .993.
TOP_K = 128
# Settings that mean nothing without the loss "logit".
LOGIT_SETTINGS = ("divergence", "temperature", "top_k")
SELF = "self"
LAYERS = "layers:"


@dataclass(frozen=True)
class Settings:
    """Settings of a run.

    Attributes:
        teacher: name or path of the teacher.
        data: path of a text file, or ``"self"`` for texts that the teacher writes.
        minutes: time limit of loading, recording and training together.
        student: ``"layers:0,1,4"`` for some of the teacher's layers, or name or path of another checkpoint; ``None``
            for the layers that are chosen for ``stages``.
        stages: numbers of layers, largest first; each stage of the training has one. Empty with ``student``.
        evaluation: path of an unseen text; ``None`` for a part of the data.
        losses: some of ``LOSSES``, whose sum is minimised.
        divergence: divergence of the logits, one of ``DIVERGENCES``; see :func:`fastinfer.distill.losses.logit_loss`.
        temperature: divisor of the logits.
        learning_rate: largest learning rate.
        context: tokens of a text.
        top_k: number of likeliest tokens that are recorded of each position; ``None`` for ``TOP_K``, and with
            ``WHOLE`` divergences.

    Raises:
        RequestError: ``student`` or ``stages`` are not such lists, or not exactly one of them is given; a setting of
            the logit loss is given without it; or ``top_k`` is given where whole distributions are recorded.
    """

    teacher: str
    data: str
    minutes: float
    student: str | None = None
    stages: tuple[int, ...] = ()
    evaluation: str | None = None
    losses: tuple[str, ...] = ("logit",)
    divergence: str = "fkl"
    temperature: float = 1.0
    learning_rate: float = 4e-4
    context: int = 256
    top_k: int | None = None

    def __post_init__(self) -> None:
        if (self.student is None) == (not self.stages):
            raise RequestError("expected one of student and stages, got both or none")
        if list(self.stages) != sorted(set(self.stages), reverse=True):
            raise RequestError(f"stages: expected descending numbers, got {','.join(map(str, self.stages))}")
        if "logit" not in self.losses:
            for name in LOGIT_SETTINGS:
                if (value := getattr(self, name)) != getattr(Settings, name):
                    raise RequestError(
                        f"{name}: expected none without the loss logit, got {value} with {','.join(self.losses)}"
                    )
        if self.top_k is not None and self.records_whole:
            raise RequestError(
                f"top_k: expected none with the divergence {self.divergence}, which needs whole distributions, "
                f"got {self.top_k}"
            )
        _ = self.kept_layers  # which checks them

    @property
    def records_whole(self) -> bool:
        """Whether the records give the teacher's whole distributions."""
        return "logit" in self.losses and self.divergence in WHOLE

    @property
    def num_top(self) -> int:
        """Number of likeliest tokens that are recorded of each position."""
        return self.top_k or TOP_K

    @property
    def kept_layers(self) -> list[int] | None:
        """The teacher's layers that ``student`` names; ``None`` if it names none."""
        if self.student is None or not self.student.startswith(LAYERS):
            return None
        numbers = self.student.removeprefix(LAYERS).split(",")
        layers = [int(number) for number in numbers if number.isdecimal()]
        if len(layers) != len(numbers) or layers != sorted(set(layers)):
            raise RequestError(f"student: expected ascending numbers such as layers:0,1,4, got {self.student!r}")
        return layers
