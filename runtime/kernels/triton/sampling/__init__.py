"""The sampler: logits and a row's parameters to one token, with the reference's bits."""
