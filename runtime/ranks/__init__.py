"""Tensor-parallel ranks: the memory that they share, what they exchange within a launch, and how they follow rank 0."""
