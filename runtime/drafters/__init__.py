"""Drafters: what guesses the tokens that the next launch verifies."""
