"""Kernels that change the row state: apply a plan, prepare the inputs of F, commit the tokens of S."""
