"""What a GPU keeps of each row besides its caches: parameters, drafts, grammar masks, state slots."""
