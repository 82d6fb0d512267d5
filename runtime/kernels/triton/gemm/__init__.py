"""Matrix products: small-batch GEMM, cuBLASLt, chains and FP8 on Hopper, their epilogues and tile sizes."""
