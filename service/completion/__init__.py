"""One completion, from its checked request to the last event of its stream."""
