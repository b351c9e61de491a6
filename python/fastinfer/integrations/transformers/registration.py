"""What transformers is told of us."""

from transformers import AttentionInterface, AttentionMaskInterface

from fastinfer.integrations.transformers.attention import attention_forward
from fastinfer.integrations.transformers.mask import attention_mask

NAME = "fastinfer"


def register() -> None:
    """Make ``attn_implementation="fastinfer"`` known. More than once does no harm.

    Raises:
        ImportError: transformers is not installed, or older than version 5.
    """
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)  # without one, padding would be ignored
