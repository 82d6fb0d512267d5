"""What crosses the socket between a front end and the engine."""
