"""The `gemserve-client` command: talks to a running server."""
