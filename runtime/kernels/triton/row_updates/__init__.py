"""Kernels that update the row state: apply a plan, prepare F's inputs, commit S's tokens."""
