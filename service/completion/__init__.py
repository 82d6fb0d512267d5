"""A completion from its checked request to its stream's last event."""
