"""`python -m benchmarks.fleet`: a simulation of 1 to 1,000 replicas behind a router, by measured times of launches."""
