"""The routes of the server, one file per interface."""
