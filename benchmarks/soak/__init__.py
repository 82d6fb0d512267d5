"""`make soak`: minutes of every fault at once, beside a canary whose tokens must never change."""
