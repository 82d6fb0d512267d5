"""The contract as code: its bounds, what a valid request is, and what its errors look like."""
