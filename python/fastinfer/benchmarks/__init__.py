"""Benchmarks of ``fastinfer bench``. The module of each command has a function ``run``."""
