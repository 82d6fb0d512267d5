"""The logs of a process that serves clients."""
