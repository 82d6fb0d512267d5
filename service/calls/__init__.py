"""A call of any method: who calls, whether it is let in, how it ends, and what is said of it."""
