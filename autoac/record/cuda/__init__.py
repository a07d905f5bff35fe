"""What a step takes on CUDA, known without one: its ops, autocast, attention kernels and cuBLAS workspaces."""
