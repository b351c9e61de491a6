"""Experts and their router, from the metadata of a GGUF file."""

from fastinfer.errors import UnsupportedModelError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.models.config import MAX_SIZE, RouterConfig
from fastinfer.models.gguf_architectures import ARCHITECTURES


def router(file: GGUFFile, architecture: str) -> RouterConfig:
    """Return how the experts of a token are chosen."""
    if not file.get(f"{architecture}.expert_count", int, 0):
        return RouterConfig()  # whatever the file says of groups
    if architecture == "phimoe":
        if (count := file.get("phimoe.expert_used_count", int)) != 2:
            raise UnsupportedModelError(f"{file.path}: phimoe.expert_used_count must be 2, got {count}")
        # The files do not say the tolerance, which is that of the published model.
        return RouterConfig("sparsemixer", renormalize=False, jitter=0.01)
    family = ARCHITECTURES[architecture]
    has_bias = any(name.endswith((".exp_probs_b.bias", ".exp_probs_b")) for name in file.tensors)
    # The first files of GLM-4.7-Flash do not say it; DeepSeek-V2, whose scores are a softmax, has no bias.
    is_sigmoid = family.sigmoid_router or (architecture == "deepseek2" and has_bias)
    scoring = file.get(f"{architecture}.expert_gating_func", int, 2 if is_sigmoid else 1)
    if scoring not in (1, 2):
        raise UnsupportedModelError(
            f"{file.path}: expert_gating_func must be 1 (softmax) or 2 (sigmoid), got {scoring}"
        )
    groups = file.get(f"{architecture}.expert_group_count", int, 1, minimum=1)
    if architecture == "deepseek2" and scoring == 1 and groups > 1:  # DeepSeek-V2 takes the largest score of a group
        raise UnsupportedModelError(f"{file.path}: expert_group_count must be 1 for softmax scores, got {groups}")
    return RouterConfig(
        scoring="sigmoid" if scoring == 2 else "softmax",
        has_bias=has_bias,
        num_groups=groups,
        top_groups=file.get(f"{architecture}.expert_group_used_count", int, 1, minimum=1, maximum=groups),
        renormalize=file.get(f"{architecture}.expert_weights_norm", bool, family.renormalizes),
        # 0 is written for 1, too.
        scale=file.get(f"{architecture}.expert_weights_scale", float, 1.0, minimum=0.0) or 1.0,
    )


def shared_intermediate_size(file: GGUFFile, architecture: str) -> int:
    """Return the width of the shared expert, 0 for none."""
    key = f"{architecture}.expert_shared_feed_forward_length"
    count = file.get(f"{architecture}.expert_shared_count", int, 0, minimum=0, maximum=64)
    width = file.get(f"{architecture}.expert_feed_forward_length", int, 0, minimum=0, maximum=MAX_SIZE)
    return file.get(key, int, 0, minimum=0, maximum=MAX_SIZE) or count * width
