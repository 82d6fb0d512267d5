"""`config.json`: the fields of every model, known keys, and readers of single values."""
