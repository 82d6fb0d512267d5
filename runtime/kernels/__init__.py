"""Kernel sets: `reference` in plain torch, the oracle, and Triton kernels for CUDA."""
