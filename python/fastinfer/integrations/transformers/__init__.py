"""Integration into transformers 5: ``attn_implementation="fastinfer"``, quantisation while loading, and ``replace``.

>>> from transformers import AutoModelForCausalLM  # doctest: +SKIP
>>> from fastinfer.integrations.transformers import FastinferConfig, register
>>> register()
>>> model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="fastinfer")  # doctest: +SKIP
>>> small = AutoModelForCausalLM.from_pretrained(path, quantization_config=FastinferConfig("int4"))  # doctest: +SKIP
"""

from fastinfer.integrations.transformers.quantizer import FastinferConfig
from fastinfer.integrations.transformers.registration import register
from fastinfer.integrations.transformers.replace import Replacement, replace

__all__ = ["FastinferConfig", "Replacement", "register", "replace"]
