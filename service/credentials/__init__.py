"""Credential files, read again when they change: callers and TLS certificates."""
