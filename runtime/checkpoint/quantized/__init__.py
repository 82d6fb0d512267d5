"""Checkpoints in the Hugging Face layout whose weights are quantized.

`read_config.py` reads `quantization_config`, `find.py` finds the tensors that make up a weight, and `tensor.py`
dequantizes them. The rest of the service sees the names and shapes of an unquantized checkpoint.
"""
