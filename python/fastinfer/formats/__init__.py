"""Checkpoint readers: each turns one file format into metadata and losslessly unpacked tensors."""
