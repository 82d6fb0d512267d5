"""What the exact kernels of decode launches cost on the GPU of this machine."""
