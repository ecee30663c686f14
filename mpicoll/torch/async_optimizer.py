"""Asynchronous training of PyTorch's modules by a parameter server."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch

from mpicoll.parameter_server import ParameterServer
from mpicoll.torch import tensor_communicator as communicator
from mpicoll.torch.flat_parameters import FlatParameters
from mpicoll.torch.world import world


class AsyncOptimizer:
    """Optimizer whose parameters and state are kept by servers; no worker waits for another one's step.

    The last `servers` ranks are servers, the others workers, each with its own samples. A worker's step sends its
    gradients to the servers, which update the parameters, and reads the newest parameters. Call
    :func:`mpicoll.torch.init` first.

    >>> optimizer = mpicoll.torch.AsyncOptimizer(model.parameters(), lr=0.1, optimizer="momentum", staleness=4)
    >>> with optimizer:
    ...     if optimizer.is_server:
    ...         optimizer.serve()                   # until all workers have finished
    ...     else:
    ...         for x, y in batches:
    ...             optimizer.zero_grad()
    ...             loss(model(x), y).backward()
    ...             optimizer.step()
    ...         optimizer.finish()                  # the final parameters

    Parameters
    ----------
    parameters
        The model's parameters, all of float32 or all of float64; those of rank 0 are broadcast.
    lr
        Learning rate of a gradient; with several workers the updates add up.
    servers, optimizer, staleness, compression, **settings
        As for :class:`mpicoll.ParameterServer`.

    Attributes
    ----------
    is_server : bool
        Whether this rank is a server.
    lr : float
        Learning rate of the next step.

    Raises
    ------
    RuntimeError
        If :func:`mpicoll.torch.init` was not called.
    TypeError, ValueError
        If an argument is wrong; the message names it.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        lr: float,
        *,
        servers: int = 1,
        optimizer: str = "sgd",
        **settings: Any,
    ) -> None:
        self._flat, self.lr = FlatParameters(parameters), lr
        initial = communicator.broadcast_(self._flat.read(), 0)
        self._flat.write(initial)
        comm = world().comm
        self.server = ParameterServer(
            initial.numpy().copy(), comm=comm, lr=lr, servers=servers, optimizer=optimizer, **settings
        )
        self.is_server = self.server.is_server
        self._pulled = torch.zeros_like(initial)

    def __enter__(self) -> AsyncOptimizer:
        self.server.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.server.__exit__(kind, error, trace)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as optimizers of PyTorch do."""
        for parameter in self._flat.parameters:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def step(self) -> int:
        """Send the gradients and take the newest parameters; return how many updates came between, the staleness.

        Raises
        ------
        CollectiveTimeout
            If a server, or with a bound on staleness the slowest worker, shows no sign of life.
        RemoteError
            If a server has failed.
        """
        staleness = self.server.push(self._flat.read_gradients().numpy(), rate=self.lr)
        self.pull()
        return staleness

    def pull(self) -> None:
        """Take the newest parameters."""
        self.server.pull(self._pulled.numpy())
        self._flat.write(self._pulled)

    def serve(self) -> None:
        """Serve until all workers have finished; on servers."""
        self.server.serve()

    def finish(self) -> None:
        """Wait for all workers and take the final parameters, with all their gradients; on workers."""
        self.server.result(self._pulled.numpy())
        self._flat.write(self._pulled)
