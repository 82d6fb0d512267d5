"""Who holds which memory of the device. No torch, clock, thread or logger."""
