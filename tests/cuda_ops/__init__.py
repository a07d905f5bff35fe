"""What autoac takes to be CUDA's ops, held against a CUDA build of torch: `python -m tests.cuda_ops`."""
