"""What a launch computes: S, apply and F over a model, on a CPU (`cpu`) and on a GPU (`cuda`).

A file name that both packages have means the same thing in both.
"""
