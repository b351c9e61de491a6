"""What ``fastinfer bench`` measures; each command is a module with ``run``."""
