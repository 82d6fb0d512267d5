"""Masks of rows with structured output: where they lie, who makes them, and how the engine asks for them."""
