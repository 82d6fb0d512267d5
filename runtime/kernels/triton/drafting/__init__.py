"""Drafting on the device: n-grams, grammar-forced tokens, and the inputs and steps of draft heads."""
