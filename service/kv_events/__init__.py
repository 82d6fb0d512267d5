"""Which KV blocks the engine's prefix cache holds, for routers: what changes, in numbered batches, and all of it."""
