"""Shared memory of the ranks of a node: memory segments, the allocator for NumPy arrays, and operations."""
