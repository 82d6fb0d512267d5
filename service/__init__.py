"""The gRPC process: servicers, limits, text and tokens, output streams, settings and the command line."""
