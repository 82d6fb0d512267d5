"""Every setting: where it may be set, and which of them go together. Nothing here loads gRPC."""
