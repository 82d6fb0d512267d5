"""Converts text to tokens and tokens to text."""
