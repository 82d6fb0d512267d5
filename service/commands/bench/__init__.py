"""`runahead bench`: load on a running service as its clients see it. These modules need only gRPC and the stubs, so
`runahead-client` has them too.
"""
