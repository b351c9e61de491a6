"""Response cache: finished answers of deterministic requests, in memory or in Redis."""
