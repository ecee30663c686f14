"""Machines' files, predictions beyond the simulator, and the command line; no MPI."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpicoll.__main__ import main
from mpicoll.errors import MachineFileError, UnknownAlgorithm
from mpicoll.predict import fit
from mpicoll.predict.crossover import crossover
from mpicoll.predict.predictor import PredictedCase, blocks, extrapolates, names, predict, shared_seconds
from mpicoll.schedules import ALGORITHMS, find
from mpicoll.schedules.machine import (
    UNBOUNDED,
    Correction,
    Fitted,
    Link,
    MachineDescription,
    ReduceClass,
    SharedPoint,
    SizeClass,
    Wire,
    load,
    parse,
    save,
    textbook,
)
from mpicoll.schedules.simulate import simulate

POINTS = tuple(
    SharedPoint(collective, ranks, nbytes, ranks * 1e-6 + nbytes * 1e-9)
    for collective in ("allreduce", "reduce_scatter", "allgather")
    for ranks in (2, 4)
    for nbytes in (8, 1 << 16, 1 << 20)
)
KNOWN = Fitted((2, 4), 2, 8, 1 << 20, 0.125, 40)


def measured() -> MachineDescription:
    machine = textbook()
    inside = replace(machine.inside, oversubscribed=tuple(replace(row, latency=1e-3) for row in machine.inside.classes))
    return replace(
        machine,
        name="measured",
        inside=inside,
        crowd=32,
        shared=POINTS,
        corrections={"allreduce/ring": Correction(2.0, 0.5)},
        fitted=KNOWN,
    )


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MPICOLL_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("machine", [textbook(), measured()], ids=["textbook", "measured"])
def test_what_is_saved_is_loaded(machine: MachineDescription, tmp_path: Path) -> None:
    path = tmp_path / "new" / "machine.json"
    save(machine, path)
    save(machine, path)
    assert load(path) == machine
    assert list(path.parent.iterdir()) == [path]


def changed(*keys: str | int, value: Any) -> Callable[[str], str]:
    def edit(text: str) -> str:
        content = json.loads(text)
        place = content
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value
        return json.dumps(content)

    return edit


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda text: text[: len(text) // 2], ""),
        (lambda text: "[]", "does not describe a machine"),
        (lambda text: '{"format": 1, "rules": {}}', "does not describe a machine"),
        (changed("version", value=99), "version is 99"),
        (changed("call", value="fast"), "call: 'fast'"),
        (changed("cores", value=0), "cores are 0"),
        (changed("step", value=-1), "step: -1"),
        (changed("step", value=float("nan")), "step: nan"),
        (changed("one_host", value=1), "one_host: 1"),
        (changed("inside", "classes", value=[]), "ascending"),
        (changed("inside", "classes", 0, "below", value=UNBOUNDED), "ascending"),
        (changed("reduce", -1, "below", value=1 << 40), "ascending"),
        (changed("inside", "oversubscribed", 0, "below", value=5), "oversubscribed"),
        (changed("inside", "streams", value=0), "streams"),
        (changed("between", "classes", 0, "speed", value=1), "damaged"),
        (changed("fitted", "ranks", value=None), "damaged"),
        (changed("fitted", "nodes", value=True), "nodes"),
        (changed("shared", 0, "seconds", value=None), "seconds"),
        (changed("shared", 0, "seconds", value=0.0), "seconds: 0.0 is not a time"),
        (changed("call", value=10**400), "int too large"),
        (lambda text: "[" * 200_000, "recursion"),
    ],
)
def test_a_damaged_file_is_named(damage: Callable[[str], str], says: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(damage(measured().to_json()))
    with pytest.raises(MachineFileError, match=r"machine\.json") as caught:
        load(path)
    assert says in str(caught.value)


def test_a_missing_or_foreign_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(MachineFileError, match=r"nothing\.json"):
        load(tmp_path / "nothing.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(MachineFileError, match="binary"):
        load(tmp_path / "binary")


def test_the_text_is_checked_as_well() -> None:
    assert parse(measured().to_json()) == measured()


def case(size: int, nbytes: int, per_node: int = 1, collective: str = "allreduce") -> PredictedCase:
    return PredictedCase(collective, blocks(size, per_node), nbytes)


def test_a_prediction_is_the_simulation_in_three_parts() -> None:
    machine = textbook()
    found = predict(machine, case(8, 1 << 20), "ring")
    assert math.isclose(found.seconds, simulate(find("allreduce", "ring"), 8, 1 << 20, machine), rel_tol=1e-12)
    assert math.isclose(found.sending, 14 * (1 << 17) * 0.8e-9, rel_tol=1e-6)
    assert math.isclose(found.reducing, 7 * (1 << 17) * 0.05e-9, rel_tol=1e-6)
    assert math.isclose(found.algbw, (1 << 20) / found.seconds)
    assert math.isclose(found.busbw, found.algbw * 14 / 8)
    quick = predict(machine, case(8, 1 << 20), "ring", split=False)
    assert math.isclose(quick.seconds, found.seconds, rel_tol=1e-12)


def test_corrections_are_applied() -> None:
    machine = measured()
    plain, corrected = (predict(m, case(4, 4096), "ring") for m in (replace(machine, corrections={}), machine))
    assert math.isclose(corrected.latency, 2 * plain.latency)
    assert math.isclose(corrected.sending, plain.sending / 2)
    assert predict(machine, case(4, 4096), "ring", split=False).seconds == corrected.seconds


def test_shared_memory_is_read_from_points() -> None:
    assert shared_seconds(POINTS, "allreduce", 2, 0) == POINTS[0].seconds
    assert math.isclose(shared_seconds(POINTS, "allreduce", 4, 1 << 16), 4e-6 + (1 << 16) * 1e-9)
    between = shared_seconds(POINTS, "allreduce", 3, 1 << 18)
    assert 3e-6 + (1 << 16) * 1e-9 < between < 4e-6 + (1 << 20) * 1e-9
    longest = shared_seconds(POINTS, "allreduce", 4, 1 << 20)
    assert math.isclose(shared_seconds(POINTS, "allreduce", 4, 1 << 22), 4 * longest)
    assert shared_seconds(POINTS, "allreduce", 64, 8) > shared_seconds(POINTS, "allreduce", 4, 8)


def test_shared_and_hierarchy_where_they_are_possible() -> None:
    machine = measured()
    assert names(machine, case(4, 8, 4))[0] == "shared"
    assert names(machine, case(8, 8, 4))[0] == "hierarchy"
    assert "hierarchy" not in names(machine, case(6, 8, 4))  # nodes that are not alike
    assert set(names(textbook(), case(8, 8, 4))) == set(ALGORITHMS["allreduce"])
    with pytest.raises(UnknownAlgorithm, match="'shared'"):
        predict(machine, case(8, 8, 4), "shared")
    whole = predict(machine, case(8, 1 << 16, 4), "hierarchy").seconds
    inside = sum(shared_seconds(POINTS, kind, 4, 1 << 16) for kind in ("reduce_scatter", "allgather"))
    assert whole > inside
    assert (
        predict(machine, case(8, 16 << 20, 4), "hierarchy").seconds
        < 16 * predict(machine, case(8, 1 << 20, 4), "hierarchy").seconds
    )  # segments overlap


def test_what_is_extrapolated_is_said() -> None:
    machine = measured()
    assert extrapolates(machine, case(4, 4096, 2)) == ""
    assert extrapolates(machine, case(4096, 1 << 30)) == "extrapolated in ranks, nodes, bytes"
    assert extrapolates(textbook(), case(4, 8)) == "nothing was measured"


def test_a_line_is_found_in_spite_of_a_disturbed_measurement() -> None:
    lengths = [8, 256, 1024, 4096, 8192, 16384]
    seconds = [2e-6 + n * 1e-9 for n in lengths]
    assert np.allclose(fit.line(lengths, seconds), (2e-6, 1e-9), rtol=1e-6)
    seconds[2] *= 10
    assert np.allclose(fit.line(lengths, seconds), (2e-6, 1e-9), rtol=0.1)
    assert fit.line([8, 16, 32], [3e-6, 2e-6, 1e-6])[1] == 0.0


def test_the_executor_and_corrections_are_found_again() -> None:
    truth = replace(textbook(), call=7e-6, step=3e-6)
    sizes = [(4, 8), (8, 8), (8, 1024), (5, 64)]
    samples = [
        fit.Sample(one, name, predict(truth, one, name).seconds)
        for one in (case(size, nbytes) for size, nbytes in sizes)
        for name in ("ring", "recursive_doubling")
    ]
    found = fit.executor(replace(truth, call=0.0, step=0.0), samples)
    assert np.allclose(found, (7e-6, 3e-6), rtol=0.05)
    slower = [sample._replace(seconds=2 * sample.seconds) for sample in samples]
    factors = fit.corrections(truth, slower)
    assert math.isclose(factors["allreduce/ring"].latency, 2.0, rel_tol=0.05)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["predict", *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.usefixtures("cache")
def test_one_algorithm(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "ring", "--size", "1024", "--bytes", "64MB")
    assert text.startswith("machine: textbook 10 Gbit/s cluster, not measured\n")
    (row,) = [line for line in text.splitlines() if line.startswith("ring")]
    assert row.split()[1:4] == ["1024", "64", "MB"]
    shares = [int(cell[:-1]) for cell in row.split() if cell.endswith("%")]
    assert abs(sum(shares) - 100) <= 1
    assert "--fit measures your machine" in text
    assert run(capsys, "ring", "--size", "1024", "--nbytes", "64MB") == text
    assert "bruck" in run(capsys, "bruck", "--nbytes", "1K")
    text = run(capsys, "ring", "--nbytes", "1K", "--wire-ratio", "0.25")
    assert "compressed to 0.25 of the bytes, encoded and decoded in no time\n" in text


def test_the_winners(capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    save(measured(), cache / "machine.json")
    text = run(capsys, "--size", "4", "64", "--nbytes", "8", "1MB", "2MB", "--ranks-per-node", "4")
    rows = [line.split() for line in text.splitlines() if line.startswith(("8 B", "1 MB", "2 MB"))]
    assert rows[0][2] == "shared"
    assert [row[4].endswith("*") for row in rows] == [False, False, True]
    assert all(row[-1].endswith("*") for row in rows)
    assert "measured on 2, 4 ranks, 2 nodes, 8 B to 1 MB; median error 12%" in text
    assert "* extrapolated in ranks, nodes: 64 ranks" in text


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--size 64 --ranks-per-node 8", "hierarchy on 64 ranks"),
        ("--size 6 --ranks-per-node 4", "hierarchy on 6 ranks"),
        ("--size 4 --ranks-per-node 4", "shared on 4 ranks"),
        ("ring --size 4 16 64 --ranks-per-node 4", "shared on 4 ranks and hierarchy on 16, 64 ranks"),
        ("--collective bcast --size 64 --ranks-per-node 8", "hierarchy on 64 ranks"),
        ("--collective alltoall --size 64 --ranks-per-node 8", ""),
        ("--collective allgather --size 6 --ranks-per-node 4", ""),
        ("--size 64", ""),
    ],
)
def test_what_auto_takes_is_said_where_its_time_is_not_predicted(
    line: str, said: str, capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    start, end = 'algorithms by messages only: "auto" takes ', ", whose time is not predicted\n"
    text = run(capsys, *line.split(), "--nbytes", "1K")
    assert text.partition(start)[2].partition(end)[0] == said
    save(replace(measured(), fitted=replace(KNOWN, ranks=(2, 64), nodes=16)), cache / "machine.json")
    text = run(capsys, *line.split(), "--nbytes", "1K")
    predicted = "bcast" not in line and "--size 6 " not in line
    assert text.partition(start)[2].partition(end)[0] == ("" if predicted else said)


@pytest.mark.usefixtures("cache")
def test_compression_is_shown_and_counts(capsys: pytest.CaptureFixture[str]) -> None:
    plain = run(capsys, "--nbytes", "16MB")
    text = run(capsys, "--nbytes", "16MB", "--wire-ratio", "0.25", "--codec-gbps", "20")
    assert "compressed to 0.25 of the bytes, encoded and decoded at 20 GB/s" in text
    assert "compressed" not in plain
    assert float(text.split("16 MB")[1].split()[1]) < float(plain.split("16 MB")[1].split()[1])


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_a_drawing(capsys: pytest.CaptureFixture[str], tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"times{suffix}"
    assert str(path) in run(capsys, "--size", "4", "16", "--nbytes", "1K", "1M", "--plot", str(path))
    content = path.read_bytes()
    assert b"recursive_doubling" in content or content.startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rings"], "there is no 'rings'"),
        (["rings"], "tree, shared, hierarchy; collectives are"),
        (["bruck", "--collective", "allreduce"], "'bruck' is not one for allreduce"),
        (["shared"], "the time of 'shared'"),
        (["ring", "--machine", "no such file"], "no such file"),
        (["ring", "--plot", "a.pdf"], "a.pdf ends in none of .svg, .png"),
        (["--compression", "int8", "--nbytes", "64K"], "--nbytes is not for --compression"),
        (["--compression", "int8", "--wire-ratio", "0.5"], "--wire-ratio is not for --compression"),
        (["ring", "--save", "x.json"], "--save is not for predictions, without --fit"),
        (["ring", "--fit"], "'ring' is not for --fit"),
        (["ring", "--segments", "4"], "--segments is not for ring, which has no segments"),
        (["--collective", "barrier", "--segments", "4"], "--segments is not for barrier, which has no segments"),
        (["--machine", "none"], "--machine none: cannot be used as a machine file: No such file or directory\n"),
        (["--plot", "/no/where/a.svg"], "--plot /no/where/a.svg: there is no folder /no/where\n"),
    ],
)
@pytest.mark.usefixtures("cache")
def test_what_cannot_be_done_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["predict", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("option", [["--size", "0"], ["--wire-ratio", "-1"], ["--codec-gbps", "inf"], ["--no-such"]])
def test_unreadable_arguments_end_with_status_2(option: list[str]) -> None:
    assert main(["predict", "ring", *option]) == 2


def test_neither_mpi_nor_numba_nor_matplotlib_is_needed(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "sys.modules['mpi4py'] = sys.modules['numba'] = sys.modules['matplotlib'] = None\n"
        "from mpicoll.__main__ import main\n"
        "status = main(['predict', '--size', '3', '--nbytes', '8'])\n"
        f"sys.exit(status or main(['predict', '--nbytes', '8', '--plot', {str(tmp_path / 'a.svg')!r}]) + 40)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 42, done.stderr
    assert 'pip install "mpicoll[plot]"' in done.stderr


def fluid(per_byte: float, latency: float) -> MachineDescription:
    """A machine on which nothing costs time but latency and bytes, between nodes."""
    link = Link((SizeClass(UNBOUNDED, latency, 0.0, 0.0, per_byte),))
    return MachineDescription("fluid", link, link, (ReduceClass(UNBOUNDED, 0.0),), 0.0, 0.0, 1)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_compressed_allreduce_costs_two_exchanges_and_the_compressor(size: int) -> None:
    wire, nbytes = Wire(0.25, 2e-9, 1e-9), 3 << 20
    found = predict(fluid(8e-9, 1e-5), PredictedCase("allreduce", blocks(size, 1), nbytes), "two_shot", wire=wire)
    assert found.latency == pytest.approx(2e-5)
    assert found.sending == pytest.approx(2 * (size - 1) / size * nbytes / 4 * 8e-9)
    assert found.reducing == pytest.approx(nbytes * (2e-9 * (1 + 1 / size) + 2e-9))


def test_crossovers() -> None:
    """Half a millisecond of latency costs more than compressing saves until the vector is long."""
    nodes = blocks(4, 1)
    near, far = (crossover(fluid(8e-9, latency), nodes, Wire(0.25, 1e-10, 1e-10)) for latency in (0.0, 5e-4))
    assert near.nbytes == 1 << 10
    assert far.nbytes is not None
    assert far.nbytes > 4 * near.nbytes
    assert far.gain == pytest.approx(near.gain, rel=0.05) == pytest.approx(3.7, rel=0.05)
    assert crossover(fluid(8e-9, 0.0), nodes, Wire(0.25, 1e-8, 1e-8)).nbytes is None
    assert crossover(fluid(1e-11, 0.0), nodes, Wire(0.25, 1e-10, 1e-10)).nbytes is None
    assert crossover(fluid(8e-9, 1e-4), nodes, Wire()).nbytes is None


def test_crossovers_on_the_command_line(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["predict", "--compression", "int8", "sign:block=64", "--size", "2", "4"]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "2 ranks" in shown
    assert "sign:block=64" in shown
    kept = (cache / "compressors.json").read_text()
    assert len(json.loads(kept)["speeds"]) == 2
    assert main(command) == 0
    assert (cache / "compressors.json").read_text() == kept
    (cache / "compressors.json").write_text(kept[:50])
    assert main(command) == 0
    assert len(json.loads((cache / "compressors.json").read_text())["speeds"]) == 2
    capsys.readouterr()
    assert main(["predict", "ring", "--compression", "int8"]) == 2
    assert "only for allreduce, without the name of an algorithm; got 'ring'" in capsys.readouterr().err
    assert main(["predict", "--compression", "topk:0.01"]) == 2
    assert "topk:0.01 does not use the two-shot allreduce" in capsys.readouterr().err
    assert main(["predict", "--compression", "int88"]) == 2
    assert "'int88' is not one of" in capsys.readouterr().err


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_a_machine_file_is_a_regular_file(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "m.json")
    with pytest.raises(MachineFileError, match=r"m\.json: .*not a regular file"):
        load(tmp_path / "m.json")
