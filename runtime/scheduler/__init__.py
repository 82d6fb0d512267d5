"""Who is in the next launch, and what its tokens mean. No torch, clock, thread or logger.

More than 15 files: each has one rule that is read, tested and mutated by itself.
"""
