"""Predicted times of collectives on a described machine: the simulator, its corrections, and the file that is kept.

``python -m mpicoll predict`` needs no MPI; with ``--fit`` it measures the machine that it runs on.
"""
