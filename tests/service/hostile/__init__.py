"""Attacks on a running service. A package, so that the service ends with its last test."""
