"""Row state on a GPU besides the caches: parameters, drafts, grammar masks, state slots."""
