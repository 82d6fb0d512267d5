"""KV cache events for routers: snapshots and numbered batches of changes."""
