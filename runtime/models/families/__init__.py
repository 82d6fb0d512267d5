"""Architectures, one file each: how `config.json` is read, tensor names, layers.

More than 15 files: each is one architecture and imports no other package than `blocks` and `config`, so that one more
is one more file.
"""
