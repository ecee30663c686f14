"""Our allreduce algorithms against the MPI library's own: ``python -m bench.allreduce``; see `bench.collectives`."""

import sys

from bench.collectives import main

if __name__ == "__main__":
    sys.exit(main(program="bench.allreduce", collectives=("allreduce",)))
