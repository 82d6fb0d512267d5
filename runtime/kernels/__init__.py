"""Kernel sets: `reference` in torch and NumPy for the CPU, the oracle, and Triton kernels for CUDA."""
