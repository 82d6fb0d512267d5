"""Triton kernels: the CUDA counterpart of the reference kernels, tested against them.

One package for each part of a launch. The order of the packages, from `forward` and `row_updates` down to `gpu`, is in
pyproject.toml, and the import checker holds it.
"""
