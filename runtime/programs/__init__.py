"""What a launch computes: S, apply and F over a model, on a CPU and on a GPU."""
