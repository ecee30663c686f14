"""How long a collective takes on a described machine: the simulator, what it does not know, and the file that is kept.

``python -m mpicoll predict`` needs no MPI; with ``--fit`` it measures the machine that it runs on.
"""
