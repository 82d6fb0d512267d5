"""The gRPC processes, front ends and side server, and their ports."""
