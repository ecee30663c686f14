"""Shared memory of the ranks of a node: segments, the allocator for NumPy arrays, and operations that run there."""
