"""The gRPC service: servicers, limits, text, streams, settings and the command line."""
