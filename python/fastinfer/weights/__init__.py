"""Weights in the packed forms that the kernels compute with."""
