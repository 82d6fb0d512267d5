"""The engine's process: start, assembly and end."""
