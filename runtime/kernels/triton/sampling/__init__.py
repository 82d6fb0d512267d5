"""The sampler: logits and row parameters to one token, with the reference's bits."""
