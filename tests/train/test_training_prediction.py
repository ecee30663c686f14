"""Predicted training: what is recorded is what strategies do on many ranks, and a replay takes the time it must."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.__main__ import main
from mpicoll.data.datasets import Dataset
from mpicoll.models.sequential import Model
from mpicoll.predict.predictor import blocks
from mpicoll.schedules.machine import (
    UNBOUNDED,
    Link,
    MachineDescription,
    ReduceClass,
    SizeClass,
    Wire,
    save,
    textbook,
)
from mpicoll.train.config import TrainConfig
from mpicoll.train.prediction import prediction_command, recorded_collectives, training_prediction
from mpicoll.train.prediction.recorded_collectives import (
    CollectiveEvent,
    Event,
    RecordedCommunicator,
    RecordedStep,
)
from mpicoll.train.prediction.step_recording import StepGroup, mean_step, overlapping, record_steps
from mpicoll.train.prediction.step_replay import PricedCollective, SimulatedPricing, StepTime, replay
from mpicoll.train.prediction.training_prediction import (
    PredictedHosts,
    TrainingCase,
    doubts,
    predict_training,
    wins_from,
)
from mpicoll.train.training_run import named

CONFIG = TrainConfig(
    dataset="synthetic:512x24x5", hidden=(40, 32), batch=64, bucket_bytes=2048, progress=False, overlap="off"
)
RANKS = 4
QUICK = 0.01


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MPICOLL_CACHE_DIR", str(tmp_path))
    return tmp_path


def made(config: TrainConfig = CONFIG) -> tuple[Dataset, Model]:
    return named(config, Intracomm(MPI.COMM_SELF))


class Fixed:
    """Pricing by the number of bytes: a millisecond of messages for each, and half of one of the processor."""

    def price(self, collective: str, nbytes: int, *, compressed: bool) -> PricedCollective:
        return PricedCollective(nbytes * 1e-3, nbytes * 0.5e-3)


def called(computed: float, nbytes: int) -> CollectiveEvent:
    return CollectiveEvent(Event.CALL, computed, "allreduce", nbytes)


def started(computed: float, nbytes: int, request: int) -> CollectiveEvent:
    return CollectiveEvent(Event.START, computed, "allreduce", nbytes, request=request)


def waited(computed: float, request: int) -> CollectiveEvent:
    return CollectiveEvent(Event.WAIT, computed, request=request)


# ---- replay ---------------------------------------------------------------------------------------------------------


def seconds(step: RecordedStep) -> tuple[float, float, float]:
    return tuple(round(each, 9) for each in replay(step, Fixed()))  # type: ignore[return-value]


def test_blocking_calls_are_waited_for() -> None:
    step = RecordedStep((called(0.010, 4), called(0.002, 2)), 0.001)
    assert seconds(step) == (0.013, 0.009, 0.009)
    assert math.isclose(replay(step, Fixed()).seconds, 0.022)


@pytest.mark.parametrize(
    ("computed", "waiting"),
    [(0.010, 0.002), (0.003, 0.003), (0.000, 0.006)],
    ids=["hidden", "in part", "not at all"],
)
def test_messages_overlap_with_computation_and_the_processor_does_not(computed: float, waiting: float) -> None:
    """Messages of 4 ms; of the 2 ms of the processor nothing is hidden."""
    step = RecordedStep((started(0.001, 4, 1), waited(computed, 1)), 0.0)
    assert seconds(step) == (round(0.001 + computed, 9), 0.006, waiting)


def test_messages_follow_each_other_on_the_link() -> None:
    """The second begins when the first has left the link, the third when it is called, and waits for the second."""
    step = RecordedStep((started(0.0, 4, 1), started(0.001, 3, 2), called(0.001, 1), waited(0.0, 1), waited(0.0, 2)), 0)
    # The link is busy until 4, 7 and 8 ms; the rank goes on at 8.5, and reduces for 2 and 1.5 ms.
    assert seconds(step) == (0.002, 0.012, 0.010)


def test_a_replay_that_forgets_a_wait_is_found() -> None:
    whole = RecordedStep((started(0.0, 4, 1), waited(0.001, 1)), 0.0)
    forgotten = whole._replace(events=whole.events[:1])
    assert seconds(whole) != seconds(forgotten)


# ---- recorded collectives -------------------------------------------------------------------------------------------

STRATEGIES = {
    "replicated": {},
    "overlapping": {"overlap": "on"},
    "many buckets": {"bucket_bytes": 64, "overlap": "on"},
    "sharded_optimizer": {"shard": "optimizer"},
    "sharded_optimizer, overlapping": {"shard": "optimizer", "overlap": "on"},
    "sharded_gradients": {"shard": "gradients"},
    "sharded": {"shard": "parameters"},
    "sharded, gathered ahead": {"shard": "parameters", "overlap": "auto"},
}
_FACTORS = {"allreduce": 2.0, "reduce_scatter": 1.0, "allgather": 1.0, "alltoall": 1.0}


def is_metrics(event: CollectiveEvent, ranks: int) -> bool:
    """Return True for the sum of the metrics of 1 to 8 steps, which is not counted as sent."""
    return event.collective == "allreduce" and event.nbytes in [8 * (2 + ranks) * rows for rows in range(2, 10)]


def sent_nbytes(step: RecordedStep, ranks: int) -> float:
    """Return the bytes that a rank sends in a step by optimal algorithms, without metrics."""
    return sum(
        _FACTORS[event.collective] * (ranks - 1) / ranks * event.nbytes
        for event in step.events
        if event.collective and not is_metrics(event, ranks)
    )


@pytest.mark.parametrize("options", STRATEGIES.values(), ids=STRATEGIES)
def test_what_is_recorded_is_what_the_strategy_sends(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    config, counted = replace(CONFIG, **options), watched(monkeypatch)
    (group,) = record_steps(config, *made(config), RANKS, QUICK)
    expected = counted()
    assert expected > 0
    for step in group:
        assert sent_nbytes(step, RANKS) == pytest.approx(expected, abs=4 * len(step.events))
        assert sent_nbytes(step._replace(events=step.events[1::2]), RANKS) < 0.9 * expected


def watched(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that returns the bytes that the strategy has counted in a step."""
    from mpicoll.train.prediction import step_recording

    loops, make = [], step_recording.assemble_loop

    def remembering(*arguments: Any) -> Any:
        loops.append(make(*arguments))
        return loops[-1]

    monkeypatch.setattr(step_recording, "assemble_loop", remembering)
    return lambda: loops[0].strategy.traffic().sent / loops[0].coordination.taken


def test_overlapping_steps_start_buckets_from_the_last_layer_on_before_the_first_one_is_computed() -> None:
    config = replace(CONFIG, overlap="on")
    dataset, model = made(config)
    (group,) = record_steps(config, dataset, model, RANKS, QUICK)
    events = [event for event in group[0].events if not is_metrics(event, RANKS)]
    starts = [event.nbytes for event in events if event.kind is Event.START]
    assert sum(starts) == 4 * model.parameter_count
    assert max(starts) <= CONFIG.bucket_bytes
    first_wait = [event.kind for event in events].index(Event.WAIT)
    assert first_wait == len(starts) > 2
    assert [event.kind for event in events[first_wait:]][: len(starts)] == [Event.WAIT] * len(starts)


def test_a_rank_has_its_share_of_the_samples() -> None:
    dataset, model = made()
    rows: list[int] = []
    original = dataset.train.batch

    def counting(indices: np.ndarray) -> Any:
        rows.append(len(indices))
        return original(indices)

    dataset.train.batch = counting  # type: ignore[method-assign]
    record_steps(CONFIG, dataset, model, RANKS, QUICK)
    assert set(rows) == {16, 7}  # a quarter of 64 samples, and of the 26 that are left at the end of an epoch


def test_time_in_collectives_is_not_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks: Iterator[float] = iter(range(100))
    monkeypatch.setattr(recorded_collectives.time, "perf_counter", lambda: float(next(ticks)))
    comm, vector = RecordedCommunicator(RANKS), np.ones(6, np.float32)
    comm.begin()
    comm.Allreduce(MPI.IN_PLACE, vector)
    request = comm.Iallreduce(MPI.IN_PLACE, vector)
    request.Wait()
    step = comm.end()
    assert [event.computed for event in step.events] == [1.0, 1.0, 1.0]
    assert step.computed == 1.0
    assert [event.kind for event in step.events] == [Event.CALL, Event.START, Event.WAIT]
    monkeypatch.setattr(recorded_collectives.time, "perf_counter", time.monotonic)


def test_results_are_those_of_ranks_that_hold_the_same() -> None:
    comm = RecordedCommunicator(3)
    assert (comm.Get_size(), comm.size, comm.rank) == (3, 3, 0)
    total, table, own = np.arange(4.0), np.zeros((3, 2)), np.zeros(2)
    comm.Allreduce(MPI.IN_PLACE, total)
    assert total.tolist() == [0, 3, 6, 9]
    comm.Allgather(np.array([1.0, 2.0]), table)
    assert table.tolist() == [[1, 2]] * 3
    comm.Reduce_scatter_block(np.arange(6.0), own)
    assert own.tolist() == [0, 3]
    most = np.array([7.0])
    comm.Allreduce(np.array([5.0]), most, MPI.MAX)
    assert most.tolist() == [5]


def test_local_steps_communicate_in_one_of_as_many_as_are_asked_for() -> None:
    config = replace(CONFIG, mode="local", sync_every=16)
    dataset, model = made(config)
    averaging, others = record_steps(config, dataset, model, RANKS, QUICK)
    assert (averaging.weight, others.weight) == (1 / 16, 15 / 16)
    assert all(sent_nbytes(step, RANKS) > 4 * model.parameter_count for step in averaging)
    assert not any(sent_nbytes(step, RANKS) for step in others)
    (every,) = record_steps(replace(config, sync_every=1), dataset, model, RANKS, QUICK)
    assert all(sent_nbytes(step, RANKS) for step in every)
    (never,) = record_steps(replace(config, averaging="final"), dataset, model, RANKS, QUICK)
    assert not any(sent_nbytes(step, RANKS) for step in never)


def test_groups_are_weighed() -> None:
    calling, quiet = (RecordedStep((called(0.0, nbytes),), 0.010) for nbytes in (8, 0))
    found = mean_step([StepGroup([calling] * 3, 0.25), StepGroup([quiet], 0.75)], Fixed())
    assert found == pytest.approx((0.010, 0.003, 0.003))


def test_overlap_is_automatic_between_hosts() -> None:
    auto = replace(CONFIG, overlap="auto")
    assert overlapping(auto, between_hosts=True).overlap == "on"
    assert overlapping(auto, between_hosts=False).overlap == "off"
    assert overlapping(replace(CONFIG, overlap="on"), between_hosts=False).overlap == "on"
    assert overlapping(replace(auto, shard="parameters"), between_hosts=True).overlap == "auto"


# ---- pricing --------------------------------------------------------------------------------------------------------


def fluid(per_byte: float) -> MachineDescription:
    """A machine on which nothing costs time but bytes between nodes."""
    link = Link((SizeClass(UNBOUNDED, 0.0, 0.0, 0.0, per_byte),))
    return MachineDescription("fluid", link, link, (ReduceClass(UNBOUNDED, 0.0),), 0.0, 0.0, 1)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_communication_is_that_of_the_bytes_on_a_machine_where_nothing_else_counts(ranks: int) -> None:
    (group,) = record_steps(CONFIG, *made(), ranks, QUICK)
    found = group.mean(SimulatedPricing(fluid(8e-9), blocks(ranks, 1)))
    nbytes = np.mean([sum(2 * (ranks - 1) / ranks * event.nbytes for event in step.events) for step in group])
    # Recursive doubling of short vectors, such as metrics, sends more than the least.
    # The mean over a number of steps that depends on the time is rounded.
    least = nbytes * 8e-9
    assert least * (1 - 1e-12) <= found.communication <= least * ranks * math.log2(ranks) / 2 / (ranks - 1) * 1.001
    twice = group.mean(SimulatedPricing(fluid(16e-9), blocks(ranks, 1)))
    assert twice.communication == pytest.approx(2 * found.communication)
    assert twice.computation == found.computation


def test_compressed_buckets_are_priced_with_the_compressor() -> None:
    pricing = SimulatedPricing(fluid(8e-9), blocks(4, 1), Wire(0.25, 1e-9, 2e-9))
    plain, packed = (pricing.price("allreduce", 1 << 20, compressed=compressed) for compressed in (False, True))
    assert packed.messages == pytest.approx(plain.messages / 4, rel=0.01)
    assert packed.processor == pytest.approx((1 << 20) * (1.25e-9 + 4e-9))
    assert SimulatedPricing(fluid(8e-9), (0,)).price("allreduce", 8, compressed=False) == (0.0, 0.0)


def test_another_network() -> None:
    machine = textbook().with_network(80e-9, 5e-3)
    assert {row.per_byte for row in machine.between.classes} == {80e-9}
    assert [row.latency for row in machine.between.classes] == pytest.approx([5.01e-3, 5.025e-3])
    assert machine.inside == textbook().inside
    nodes = blocks(2, 1)
    assert SimulatedPricing(machine, nodes).price("allreduce", 8, compressed=False).messages > 5e-3
    assert SimulatedPricing(machine, blocks(2, 2)).price("allreduce", 8, compressed=False).messages < 1e-3


# ---- rows -----------------------------------------------------------------------------------------------------------


def row(hosts: int, spec: str | None, milliseconds: float) -> PredictedHosts:
    return PredictedHosts(hosts, hosts, spec, 64, StepTime(milliseconds * 1e-3, 0.0, 0.0), "")


def test_a_compressor_wins_from_where_it_wins_on_all_larger_numbers() -> None:
    plain = [row(hosts, None, 10.0) for hosts in (1, 2, 4, 8)]

    def packed(*times: float) -> list[PredictedHosts]:
        return [row(hosts, "int8", each) for hosts, each in zip((1, 2, 4, 8), times, strict=True)]

    assert wins_from([*plain, *packed(11, 9, 9, 9)], "int8") == 2
    assert wins_from([*plain, *packed(5, 11, 9, 9)], "int8") == 4
    assert wins_from([*plain, *packed(9, 9, 9, 9.9)], "int8") is None


def with_times(monkeypatch: pytest.MonkeyPatch, *scales: float) -> None:
    """Let each measurement, in their order, compute for a millisecond times one of `scales`."""
    left = iter(scales)

    def recorded(*_: Any) -> list[StepGroup]:
        scale = next(left)
        return [StepGroup([RecordedStep((called(scale * part * 1e-3, 2),), 0.0) for part in (0.99, 1, 1, 1.01)], 1.0)]

    monkeypatch.setattr(training_prediction, "record_steps", recorded)


def test_compressors_share_the_computation_that_was_disturbed_least(monkeypatch: pytest.MonkeyPatch) -> None:
    with_times(monkeypatch, 1.5, 14.2, 1.37, 44.1, 0.5)
    case = TrainingCase(CONFIG, fluid(8e-9), (1, 2, 4), compressions=(None, "int8"))
    rows = predict_training(case, *made())
    milliseconds = {(each.hosts, each.compression): each.time.computation * 1e3 for each in rows}
    wanted = {1: 1.5, 2: 1.37, 4: 0.5}
    assert milliseconds == pytest.approx({(h, spec): wanted[h] for spec in (None, "int8") for h in (1, 2, 4)})
    spread = {each.hosts: each.spread for each in rows}
    assert spread == pytest.approx({1: 1.0, 2: 14.2 / 1.37, 4: 88.2}, rel=0.02)
    assert doubts(rows) == {hosts: factor for hosts, factor in spread.items() if hosts > 1}
    (warning,) = [line for line in prediction_command._notes(case, rows) if line.startswith("warning: ")]
    assert re.match(r"warning: computation on 2, 4 hosts differs by a factor of up to 8\d\.\d between", warning)
    calm = [each._replace(spread=1.2) for each in rows]
    assert not any(line.startswith("warning: ") for line in prediction_command._notes(case, calm))


def test_a_rank_does_not_compute_longer_on_more_hosts() -> None:
    rows = [row(hosts, None, each) for hosts, each in ((1, 14.2), (2, 1.37), (4, 1.5), (8, 44.1))]
    assert doubts(rows) == pytest.approx({8: 44.1 / 1.37})
    assert doubts(rows[:3]) == {}


def test_rows() -> None:
    case = TrainingCase(CONFIG, fluid(8e-6), (1, 2, 4), compressions=(None, "int8"), weak=True, seconds=QUICK)
    rows = predict_training(case, *made())
    assert [(each.hosts, each.compression) for each in rows] == [
        (h, spec) for spec in (None, "int8") for h in (1, 2, 4)
    ]
    assert [each.batch for each in rows] == [64, 128, 256] * 2
    assert rows[0].efficiency == 1.0
    assert rows[0].time.communication == 0.0
    for each in rows:
        assert each.time.waiting <= each.time.communication + 1e-12
        assert each.time.seconds == each.time.computation + each.time.waiting
        assert each.samples_per_second == each.batch / each.time.seconds
        assert each.efficiency == each.time.computation / each.time.seconds
    # 4 bytes of 2477 parameters at 8 us a byte take 79 ms; biases are not compressed, and buckets are short.
    assert rows[1].time.communication == pytest.approx(0.0793, rel=0.02)
    assert rows[4].time.communication < 0.7 * rows[1].time.communication
    assert wins_from(rows, "int8") == 2


# ---- command line ---------------------------------------------------------------------------------------------------

COMMAND = ["predict", "--training", "--seconds", "0.01", "--dataset", "synthetic:512x24x5", "--hidden", "40,32"]


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result, plot = tmp_path / "result.json", tmp_path / "plot.svg"
    outputs = ["--json", str(result), "--plot", str(plot)]
    assert main([*COMMAND, "--hosts", "2", "1", "2", "--rate", "10mbit", "--compression", "int8", *outputs]) == 0
    text = capsys.readouterr().out
    assert "textbook 10 Gbit/s cluster, not measured; links of 0.01 Gbit/s" in text
    assert "mlp of 2477 parameters, synthetic:512x24x5, replicated, 64 samples a step of all ranks" in text
    lines = [line.split() for line in text.splitlines() if line.startswith(("none ", "int8 "))]
    assert [line[:3] for line in lines[:4]] == [[s, str(h), str(h)] for s in ("none", "int8") for h in (1, 2)]
    assert "int8 wins from 2 hosts on" in text
    assert "nothing was measured on 2 hosts" in text
    content = json.loads(result.read_text())
    assert content["compression_wins_from_hosts"] == {"int8": 2}
    assert [each["hosts"] for each in content["rows"]] == [1, 2, 1, 2]
    for each in content["rows"]:
        assert each["step_seconds"] == pytest.approx(each["computation_seconds"] + each["waiting_seconds"])
    assert b"<svg" in plot.read_bytes()


def test_a_measured_machine_is_used(capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    save(replace(textbook(), name="measured"), cache / "machine.json")
    assert main([*COMMAND, "--hosts", "1", "--ranks-per-node", "2", "--strategy", "local", "--sync-every", "4"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("machine: measured\n")
    assert "local, averages after 4 steps" in text
    assert "ranks per node: 2" in text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], ""),
        (["--delay", "0"], ""),
        (["--delay", "5ms"], "; links of 5 ms more"),
        (["--rate", "1gbit"], "; links of 1 Gbit/s"),
        (["--rate", "1gbit", "--delay", "5ms"], "; links of 1 Gbit/s, 5 ms more"),
    ],
)
def test_the_heading_names_the_links(capsys: pytest.CaptureFixture[str], given: list[str], said: str) -> None:
    assert main([*COMMAND, "--hosts", "1", *given]) == 0
    assert capsys.readouterr().out.startswith(f"machine: {textbook().name}{said}\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--no-such"], "--no-such"),
        (["--strategy", "gossip"], "only strategies in which ranks take steps together"),
        (["--tensor", "2"], "--training is not for --tensor 2"),
        (["--algorithm", "ring"], "--training is not for --algorithm ring"),
        (["--compression", "topk:0.01"], "topk:0.01 does not use the two-shot allreduce"),
        (["--compression", "int88"], "int88"),
        (["--strategy", "sharded", "--compression", "sign"], "--compression sign is not for --strategy sharded"),
        (["--rate", "0mbit"], "--rate: 0 is not a positive rate"),
        (["--batch", "1024"], "takes 1024 samples, and synthetic:512x24x5 has 410 for training"),
        (["--machine", "none"], "--machine none: cannot be used as a machine file: No such file or directory\n"),
        (["--plot", "/no/where/a.svg"], "--plot /no/where/a.svg: there is no folder /no/where\n"),
        (["--plot", "a.pdf"], "a.pdf ends in none of .svg, .png"),
    ],
)
def test_what_cannot_be_predicted_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main([*COMMAND, "--hosts", "2", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_options_of_compression_are_for_the_rows_with_compression() -> None:
    config = prediction_command.parsed(["--error-feedback", "off", "--warmup-dense", "3"], ["sign", "topk:0.1"])
    assert (config.compression, config.error_feedback, config.warmup_dense) == (None, "off", 3)


@pytest.mark.parametrize("option", [["--hosts", "0"], ["--rate", "fast"], ["--delay", "5"], ["--seconds", "-1"]])
def test_unreadable_arguments_end_with_status_2(option: list[str]) -> None:
    assert main([*COMMAND, *option]) == 2
