"""The connection to the engine."""
