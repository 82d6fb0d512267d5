"""Building blocks of several families: dense decoders, experts, Mamba-2, partial rope, ranks' parts."""
