"""Placement of a shard's replicas: on other servers, on other nodes where there are some, as many on each server."""

from __future__ import annotations

import itertools

import pytest

from mpicoll.parameter_server.partition import Partition, replica_offsets


@pytest.mark.parametrize(
    ("nodes", "replicas", "offsets"),
    [
        ([0], 1, ()),
        ([0, 0], 1, ()),
        ([0, 0], 2, (1,)),
        ([0, 0, 1, 1], 2, (2,)),
        ([0, 1, 0, 1], 2, (1,)),
        ([0, 0, 1], 2, (1,)),
        ([0, 0, 1, 1, 2, 2], 3, (2, 3)),
        ([5, 5, 5], 3, (1, 2)),
    ],
)
def test_offsets(nodes: list[int], replicas: int, offsets: tuple[int, ...]) -> None:
    assert replica_offsets(nodes, replicas) == offsets


def test_no_copy_is_beside_another_and_all_servers_hold_as_many() -> None:
    for servers, replicas in itertools.product(range(1, 7), range(1, 4)):
        if replicas > servers:
            continue
        offsets = replica_offsets([shard // 2 for shard in range(servers)], replicas)
        layout = Partition(servers + 2, servers, 100, offsets)
        copies = [[layout.server_rank(shard), *layout.replica_ranks(shard)] for shard in range(servers)]
        assert all(len(set(ranks)) == replicas for ranks in copies)
        held = list(itertools.chain(*copies))
        assert all(held.count(rank) == replicas for rank in layout.server_ranks)
