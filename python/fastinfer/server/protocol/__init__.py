"""Requests as pydantic models, one file per interface."""
