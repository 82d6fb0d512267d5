"""What the processes of a service write down for each other. Nothing here loads gRPC."""
