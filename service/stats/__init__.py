"""The whole service's figures for Stats, WatchStats and Prometheus."""
