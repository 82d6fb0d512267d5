"""`runahead bench`: load on a running service, and what its clients see. Its modules need gRPC and the stubs alone, so
that `runahead-client` has them too."""
