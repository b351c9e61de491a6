"""The command line: ``fastinfer`` and its subcommands, one file each."""
