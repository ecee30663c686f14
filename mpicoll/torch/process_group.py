"""The backend ``"mpicoll"`` of ``torch.distributed``: a process group whose collectives are mpicoll's."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from mpicoll.comm import Intracomm
from mpicoll.errors import CollectiveTimeout
from mpicoll.torch import point_to_point, tensor_collectives
from mpicoll.torch.base_group import DONE, NAME, BaseGroup
from mpicoll.torch.call_forms import with_short_form
from mpicoll.torch.group_communicators import communicator_of

_SHORTEST = timedelta(milliseconds=1)
_REDUCE_SCATTER = dist.ReduceScatterOptions()


class ProcessGroup(BaseGroup):
    """A process group of ``torch.distributed`` for tensors of the CPU.

    ``torch.distributed`` makes it: ``dist.init_process_group("mpicoll")``, ``dist.new_group(ranks)``. The constructor
    is collective over `comm`.

    Calls run in the order in which the program makes them, one at a time: blocking calls on the thread that makes
    them if nothing is under way, asynchronous ones on one thread of the group. Every rank must make the same calls in
    the same order; messages between two ranks are apart from that.

    Methods that take lists of tensors and options take a tensor, a root, an operation and a timeout in their place, as
    other process groups do: ``group.reduce(tensor, 0, ReduceOp.SUM)``.

    Parameters
    ----------
    comm
        The communicator of the group, whose ranks are the group's.
    store
        The store of the group.
    timeout
        Time that a rank waits in a step of a call before it raises CollectiveTimeout.
    owns_comm
        True to free `comm` when the group is shut down.
    """

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None, *rest: Any, **named: Any) -> Any:
        """Reduce a tensor over all ranks, in place; a sparse one is added."""
        if self.reduce_now(tensors, opts):
            return DONE
        return self._allreduce(tensors, opts, *rest, **named)

    @with_short_form(dist.AllreduceOptions, "op")
    def _allreduce(self, tensors: Sequence[torch.Tensor], opts: Any) -> Any:
        (tensor,) = tensors
        function = tensor_collectives.sparse_allreduce if tensor.is_sparse else tensor_collectives.allreduce
        return self._call("all_reduce", [tensor], opts, function, tensor, opts.reduceOp)

    @with_short_form(dist.AllreduceCoalescedOptions, "op")
    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any) -> Any:
        """Reduce several tensors over all ranks, in place."""
        return self._call(
            "all_reduce_coalesced",
            tensors,
            opts,
            tensor_collectives.allreduce_coalesced,
            tensors,
            opts.reduceOp,
        )

    @with_short_form(dist.BroadcastOptions, "root")
    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any) -> Any:
        """Broadcast a tensor from the root."""
        (tensor,) = tensors
        return self._call("broadcast", [tensor], opts, tensor_collectives.broadcast, tensor, opts.rootRank)

    @with_short_form(dist.ReduceOptions, "root", "op")
    def reduce(self, tensors: Sequence[torch.Tensor], opts: Any) -> Any:
        """Reduce a tensor over all ranks to the root, in place."""
        (tensor,) = tensors
        return self._call("reduce", [tensor], opts, tensor_collectives.reduce, tensor, opts.rootRank, opts.reduceOp)

    @with_short_form(distributed_c10d.AllgatherOptions, tensors=2)
    def allgather(
        self, output_tensors: Sequence[Sequence[torch.Tensor]], input_tensors: Sequence[torch.Tensor], opts: Any
    ) -> Any:
        """Gather a tensor from every rank on all ranks, in a list."""
        (outputs,), (tensor,) = output_tensors, input_tensors
        return self._call("all_gather", output_tensors, opts, tensor_collectives.allgather, outputs, tensor)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        """Gather a tensor from every rank on all ranks, in one tensor."""
        return self._call("all_gather_single", output, opts, tensor_collectives.allgather_into, output, input)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        """Gather several tensors from every rank on all ranks, each in one tensor."""
        return self._call("all_gather_single_coalesced", outputs, opts, _gather_each, outputs, inputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(
        self, output_lists: Sequence[Sequence[torch.Tensor]], input_list: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        """Gather several tensors from every rank on all ranks, each in a list."""
        lists = [[one_rank[place] for one_rank in output_lists] for place in range(len(input_list))]
        return self._call("all_gather_coalesced", output_lists, opts, _gather_each_list, lists, input_list)

    @with_short_form(dist.GatherOptions, "root", tensors=2)
    def gather(
        self, output_tensors: Sequence[Sequence[torch.Tensor]], input_tensors: Sequence[torch.Tensor], opts: Any
    ) -> Any:
        """Gather a tensor from every rank on the root, in a list."""
        (tensor,), outputs = input_tensors, output_tensors[0] if output_tensors else []
        return self._call("gather", output_tensors, opts, tensor_collectives.gather, outputs, tensor, opts.rootRank)

    @with_short_form(dist.GatherOptions, tensors=2, in_lists=False)
    def gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Any:
        """Gather a tensor from every rank on the root, in one tensor."""
        return self._call("gather_single", output, opts, tensor_collectives.gather_into, output, input, opts.rootRank)

    gather_into_tensor = gather_single

    @with_short_form(dist.ScatterOptions, "root", tensors=2)
    def scatter(
        self, output_tensors: Sequence[torch.Tensor], input_tensors: Sequence[Sequence[torch.Tensor]], opts: Any
    ) -> Any:
        """Scatter a list of tensors from the root."""
        (output,), tensors = output_tensors, input_tensors[0] if input_tensors else []
        return self._call("scatter", [output], opts, tensor_collectives.scatter, output, tensors, opts.rootRank)

    @with_short_form(dist.ReduceScatterOptions, "op", tensors=2)
    def reduce_scatter(
        self,
        output_tensors: Sequence[torch.Tensor],
        input_tensors: Sequence[Sequence[torch.Tensor]],
        opts: Any,
    ) -> Any:
        """Reduce a list of tensors over all ranks; rank r gets the r-th."""
        (output,), (tensors,) = output_tensors, input_tensors
        return self._call(
            "reduce_scatter", [output], opts, tensor_collectives.reduce_scatter, output, tensors, opts.reduceOp
        )

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = _REDUCE_SCATTER) -> Any:
        """Reduce a tensor over all ranks; rank r gets the r-th of equal parts."""
        return self._call(
            "reduce_scatter_single",
            output,
            opts,
            tensor_collectives.reduce_scatter_from,
            output,
            input,
            opts.reduceOp,
        )

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = _REDUCE_SCATTER
    ) -> Any:
        """Reduce several tensors over all ranks; rank r gets the r-th part of each."""
        return self._call(
            "reduce_scatter_single_coalesced", outputs, opts, _reduce_scatter_each, outputs, inputs, opts.reduceOp
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    @with_short_form(dist.AllToAllOptions, tensors=2)
    def alltoall(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any) -> Any:
        """Send the r-th tensor to rank r; get one from every rank."""
        return self._call("all_to_all", outputs, opts, tensor_collectives.alltoall, outputs, inputs)

    @with_short_form(dist.AllToAllOptions, tensors=4, in_lists=False)
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any,
    ) -> Any:
        """Send the r-th part of a tensor to rank r; get one from every rank."""
        splits = list(output_split_sizes or ()), list(input_split_sizes or ())
        return self._call("all_to_all_single", output, opts, tensor_collectives.alltoall_single, output, input, *splits)

    alltoall_base = all_to_all_single

    @with_short_form(dist.BarrierOptions, tensors=0)
    def barrier(self, opts: Any) -> Any:
        """Wait until every rank has called it."""
        return self._call("barrier", [], opts, Intracomm.Barrier)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait until every rank has called it, at most `timeout`; the error names the ranks that have not come.

        ``dist.monitored_barrier`` refuses backends other than gloo; call this method of the group.

        Raises
        ------
        CollectiveTimeout
            On every rank that came; its `missing_ranks` are all that did not, whatever `wait_all_ranks` says.
        """
        options = dist.BarrierOptions()
        options.timeout = self._timeout if timeout is None else max(timeout, _SHORTEST)
        options.asyncOp = False
        try:
            self.barrier(options)
        except CollectiveTimeout as error:
            ranks = error.missing_ranks
            raise CollectiveTimeout(f"monitored_barrier: ranks {list(ranks)} have not come: {error}", ranks) from error

    def send(self, tensors: Sequence[torch.Tensor], dst: int, tag: int) -> Any:
        """Start to send a tensor to a rank."""
        (tensor,) = tensors
        return point_to_point.send(self._open("send"), tensor, dst, tag, self._timeout)

    def recv(self, tensors: Sequence[torch.Tensor], src: int, tag: int) -> Any:
        """Start to receive a tensor from a rank."""
        (tensor,) = tensors
        return point_to_point.receive(self._open("recv"), tensor, src, tag, self._timeout)

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int) -> Any:
        """Start to receive a tensor from any rank."""
        (tensor,) = tensors
        return point_to_point.receive(self._open("recv"), tensor, None, tag, self._timeout)


def _gather_each(comm: Intracomm, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    for output, tensor in zip(outputs, inputs, strict=True):
        tensor_collectives.allgather_into(comm, output, tensor)


def _gather_each_list(comm: Intracomm, lists: Sequence[Any], inputs: Sequence[torch.Tensor]) -> None:
    for outputs, tensor in zip(lists, inputs, strict=True):
        tensor_collectives.allgather(comm, outputs, tensor)


def _reduce_scatter_each(
    comm: Intracomm, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], op: Any
) -> None:
    for output, tensor in zip(outputs, inputs, strict=True):
        tensor_collectives.reduce_scatter_from(comm, output, tensor, op)


def _make(options: Any, _: Any) -> ProcessGroup:
    """Make a group for ``torch.distributed``; collective over it."""
    timeout = options.timeout
    comm = communicator_of(
        options.store, options.group_rank, options.group_size, options.group_id, options.global_ranks_in_group, timeout
    )
    return ProcessGroup(comm, options.store, timeout, owns_comm=True)


def register() -> None:
    """Register the backend with ``torch.distributed``; nothing happens the second time."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _make, extended_api=True, devices=["cpu"])
