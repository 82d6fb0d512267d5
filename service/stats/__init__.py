"""The figures of the whole service, for Stats, WatchStats and Prometheus."""
