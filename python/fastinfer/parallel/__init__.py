"""Processes of one machine (ranks) that compute a model together: each has a part of every weight, or some layers."""
