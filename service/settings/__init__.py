"""Settings: where each may be set, and which combinations are valid. Imports no gRPC."""
