"""Small helpers that do not depend on models: value checks, devices, dtypes, memory, tables, messages."""
