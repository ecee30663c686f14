"""Benchmarks of the public API: correct first, then fast, and honest about the spread."""
