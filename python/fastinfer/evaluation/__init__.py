"""Evaluation of models on a text: perplexity, and comparison of several models."""
