"""The engine: requests, scheduler, ledger, block pool, models and kernels."""
