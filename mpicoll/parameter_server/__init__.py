"""Parameter server on one-sided MPI: workers pull parameters from servers and push gradients to them."""

from mpicoll.parameter_server.client import ParameterServer

__all__ = ["ParameterServer"]
