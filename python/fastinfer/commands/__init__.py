"""The commands of ``fastinfer`` that need no other home; each module has ``run(args)``, which returns the exit code."""
