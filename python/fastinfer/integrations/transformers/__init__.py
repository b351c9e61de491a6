"""The kernels inside transformers (version 5): ``attn_implementation="fastinfer"``.

>>> from transformers import AutoModelForCausalLM  # doctest: +SKIP
>>> from fastinfer.integrations.transformers import register
>>> register()
>>> model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="fastinfer")  # doctest: +SKIP
"""

from fastinfer.integrations.transformers.registration import register

__all__ = ["register"]
