"""Registration of the attention and the quantizer with transformers."""

from importlib.metadata import version

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.quantizers.auto import (
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)

from fastinfer.integrations.transformers.attention import attention_forward
from fastinfer.integrations.transformers.mask import attention_mask
from fastinfer.integrations.transformers.quantizer import NAME, FastinferConfig, FastinferQuantizer

OLDEST = (5, 4)  # the first version that passes the offset of the queries to mask functions


def register() -> None:
    """Register ``attn_implementation="fastinfer"`` and quantisation with :class:`FastinferConfig`.

    It may be called repeatedly.

    Raises:
        ImportError: transformers is not installed, or older than version 5.4.
    """
    installed = version("transformers")
    if tuple(map(int, installed.split(".")[:2])) < OLDEST:
        raise ImportError(f"fastinfer needs transformers 5.4 or newer, got {installed}")
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)  # without it, padding would be ignored
    if NAME not in AUTO_QUANTIZER_MAPPING:
        register_quantization_config(NAME)(FastinferConfig)
        register_quantizer(NAME)(FastinferQuantizer)
