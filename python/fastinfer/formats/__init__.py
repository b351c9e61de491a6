"""Readers of checkpoint formats: each turns a file into metadata and unpacked tensors."""
