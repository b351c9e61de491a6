"""The runtime: ``engine.step()`` is schedule, run, sample, update; one noun per file."""
