"""The engine's process: start, assembly and end.

More than 15 files: a CPU, a GPU and the ranks of each are assembled in separate files; those for a GPU load Triton.
"""
