"""S, apply and F on the CPU: NumPy row state and the reference kernels."""
