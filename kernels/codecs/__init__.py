"""Kernels of compression: quantise, sparsify, encode and decode float32 vectors."""
