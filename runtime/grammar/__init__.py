"""Grammars that a completion must match, over the tokens of a model, without torch."""
