"""Kernels in plain torch, row-invariant by construction: a row's bits never depend on its neighbours."""
