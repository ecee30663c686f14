"""Asynchronous training: parameters on servers, pulled and pushed to by workers through one-sided MPI."""

from mpicoll.parameter_server.client import ParameterServer

__all__ = ["ParameterServer"]
