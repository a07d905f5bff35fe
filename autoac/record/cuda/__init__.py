"""A step's ops, autocast, attention kernels and cuBLAS workspaces on CUDA, found without a GPU."""
