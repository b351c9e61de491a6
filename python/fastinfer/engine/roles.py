"""Roles of tokens: some kernels compute the tokens of a prompt with other instructions than generated ones.

A token has its role from its position: those before ``Sequence.num_prompt_tokens`` are the prompt, all later ones are
generated. This is so in any step, so that a text depends on its request alone: a sequence that was preempted computes
its generated tokens as generated ones again.
"""

import torch

from fastinfer import _C

# Instruction sets whose kernels compute the rows of ``ops.prompt_rows`` in bf16, which rounds differently: attention
# with AVX-512 BF16, attention and products with tiles.
BF16_ISAS = frozenset({"avx512_bf16", "amx", "amx_emulated"})


def roles_differ(device: str, exact: bool) -> bool:
    """Return whether a model computes the tokens of a prompt differently than generated ones.

    Args:
        device: device that computes, ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
        exact: whether the model may round nothing, so that it does not use bf16.
    """
    return not exact and torch.device(device).type == "cpu" and _C.cpu_info()["isa"] in BF16_ISAS
