"""The GPU: its capability, programmatic dependent launch, cache of compiled kernels."""
