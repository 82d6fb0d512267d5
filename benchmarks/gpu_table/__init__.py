"""What a decode step costs on a GPU, beside the bytes it must read and the engines of others: `make bench-gpu`."""
