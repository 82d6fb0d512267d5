"""What a user runs to see it work, and how fast."""
