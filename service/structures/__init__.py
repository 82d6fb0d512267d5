"""Structures: from a request's constraint to the grammar that the engine follows."""
