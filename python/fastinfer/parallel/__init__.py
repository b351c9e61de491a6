"""Tensor parallelism: processes of one machine (ranks) that each hold a part of every weight and compute together."""
