"""The engine's process: started, put together, ended."""
