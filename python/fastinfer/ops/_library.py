"""Loads the compiled library once; everything else in ``fastinfer.ops`` goes through ``ops``."""

import torch

# torch first: the extension resolves its symbols against the libtorch that torch has loaded.
from fastinfer import _C  # noqa: F401

ops = torch.ops.fastinfer
