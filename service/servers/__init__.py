"""The processes that speak gRPC: front ends and the side server, and the ports that they listen on."""
