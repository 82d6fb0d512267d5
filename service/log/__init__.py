"""Logs of processes that serve clients."""
