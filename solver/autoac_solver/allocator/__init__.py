"""What CUDA's caching allocator reserves for a step: its options, its rules, and a step's allocations in order."""
