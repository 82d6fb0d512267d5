"""Mixture of experts: top-k routing and the experts' products."""
