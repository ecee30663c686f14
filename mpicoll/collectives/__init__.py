"""Calls of collectives: argument checks, selection of the algorithm, and execution."""
