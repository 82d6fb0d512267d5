"""What several families share: dense decoders, experts, Mamba-2, partial rope, parts of a rank."""
