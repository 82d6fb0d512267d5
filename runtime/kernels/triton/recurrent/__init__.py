"""Recurrent mixers: Mamba-2 and the gated delta net.

Each has a step kernel (rows with one token), a verify kernel (rows with drafts) and a scan (prompts).
"""
