"""Memory that the service's processes share. Imports no gRPC."""
