"""Distillation: a smaller model learns from a teacher that the engine runs."""
