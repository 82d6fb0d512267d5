"""S, apply and F on a GPU: Triton kernels, captured as CUDA graphs."""
