"""Masks of rows with structured output: the shared memory, the mask worker, and the engine's interface."""
