"""What an older GPU gets, tried on a newer one or on none."""

from __future__ import annotations

import triton

from runahead.runtime.kernels.triton.gpu.capability import current_gpu


def use_as(capability: str) -> None:
    """From here on the current GPU is used as one of this compute capability, such as "8.0", as TRITON_OVERRIDE_ARCH
    does from the start. Before any kernel runs."""
    triton.knobs.runtime.override_arch = "sm" + capability.replace(".", "")
    current_gpu.cache_clear()
