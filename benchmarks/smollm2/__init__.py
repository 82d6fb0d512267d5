"""SmolLM2-135M-Instruct, a real model that PyPI has as a GGUF file: a demo, and a comparison with transformers."""
