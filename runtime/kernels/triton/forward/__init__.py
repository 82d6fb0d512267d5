"""The forward pass: layers of a launch as sequences of kernels."""
