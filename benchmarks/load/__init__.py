"""`make load`: what the service does with as many calls as it can carry, with fewer, and with twice as many."""
