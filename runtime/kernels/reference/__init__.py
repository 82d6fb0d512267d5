"""Kernels in torch and NumPy for the CPU, row-invariant by construction: a row's bits never depend on others."""
