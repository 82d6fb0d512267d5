"""Drafts on the device: n-grams, tokens that grammars force, inputs and steps of draft heads."""
