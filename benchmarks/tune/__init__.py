"""How the kernels of decode launches are best cut on the GPU of this machine, found by trying."""
