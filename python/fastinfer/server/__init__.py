"""An HTTP server with the interfaces of OpenAI: ``fastinfer serve``, extra ``server``."""
