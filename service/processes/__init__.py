"""The supervisor, and every process that it owns. Nothing here loads gRPC or torch."""
