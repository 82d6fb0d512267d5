"""Implements the methods of each service."""
