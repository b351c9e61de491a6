"""Small helpers that know nothing of models: value checks, devices, dtypes, tables."""
