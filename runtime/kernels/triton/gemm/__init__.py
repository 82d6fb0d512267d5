"""Matrix products: GEMV, small-batch GEMM, cuBLASLt, their epilogues and tile sizes."""
