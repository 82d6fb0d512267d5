"""Guesses the tokens that the next launch verifies."""
