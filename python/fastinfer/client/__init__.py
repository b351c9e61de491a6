"""Client of OpenAI-compatible servers, for ``fastinfer chat --url`` and ``fastinfer bench serve``."""
