"""The contract as code: bounds, validation and errors."""
