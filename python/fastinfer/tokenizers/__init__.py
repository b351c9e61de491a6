"""Tokenizers: text to token ids and back, and chat templates."""
