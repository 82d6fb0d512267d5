"""Who is in the next launch, and what its tokens mean. No torch, clock, thread or logger."""
