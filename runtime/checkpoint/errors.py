"""What every reader of a checkpoint raises."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint that is not served. The sentence names the file, the key or the tensor, and says what to do next."""
