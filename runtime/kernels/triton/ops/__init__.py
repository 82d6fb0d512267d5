"""Small operations between products: norms, activations, gates, soft caps, embeddings."""
