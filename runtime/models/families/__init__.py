"""Architectures by family: how `config.json` is read, tensor names, layers. They import `blocks` and `config` alone."""
