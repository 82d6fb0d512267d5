"""What each method of each service does."""
