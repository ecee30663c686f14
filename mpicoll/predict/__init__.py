"""Prediction of the times of collectives on a described machine.

``python -m mpicoll predict`` needs no MPI; with ``--fit`` it measures the machine that it runs on.
"""
