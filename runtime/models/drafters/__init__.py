"""Models that draft: EAGLE heads, MTP heads and whole draft models, read and checked."""
