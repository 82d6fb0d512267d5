"""The contract of runahead as Python modules, one package for each version."""
