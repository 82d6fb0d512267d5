"""Triton kernels: the CUDA counterpart of the reference kernels, tested against them."""
