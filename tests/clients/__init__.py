"""Tests of the examples in `clients/`. A package, so that its services end with its last test."""
