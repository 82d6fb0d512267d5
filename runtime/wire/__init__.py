"""Messages of the socket between a front end and the engine."""
