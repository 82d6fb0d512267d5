"""Tensor-parallel ranks on GPUs of one host: exchanges, and sums on their way into the residual."""
