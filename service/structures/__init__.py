"""What a completion must be: from what a request says of it to a grammar that the engine follows."""
