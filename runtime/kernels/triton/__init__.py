"""Triton kernels: the CUDA counterpart of the reference kernels, tested against them.

One package for each part of a launch. The order of the packages, from `forward` and `row_updates` down to `gpu`, is in
pyproject.toml, and the import checker holds it.

Tensors that belong together are one argument of a kernel: a NamedTuple, such as `DraftState`, whose fields a kernel
reads by name. The compiled code is the same as with single arguments, alignment included. A field must not be named
`values` or `type`, as which Triton's tuples have something else. None, for a field or for a whole tuple, is known at
compile time: `if masks is not None`. Other numbers in a tuple are not, and a number that changes from launch to launch
stays outside, for `do_not_specialize`. A NamedTuple of numbers may be one `tl.constexpr`, such as `ChoiceSizes`.
"""
