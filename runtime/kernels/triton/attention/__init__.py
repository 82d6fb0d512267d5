"""Attention over the paged KV cache: decode, prefill, and the split of their work among CTAs."""
