"""The supervisor and its processes. Imports neither gRPC nor torch."""
