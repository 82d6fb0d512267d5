"""Files that say who may call and prove who is called, read again when they change."""
