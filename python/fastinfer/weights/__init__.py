"""Packed weights, which compute linear layers with the operators."""
