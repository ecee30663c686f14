"""Data sets, their files, and the sampler."""
