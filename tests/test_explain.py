"""The command line that draws algorithms."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mpicoll.__main__ import main
from mpicoll.schedules import ALGORITHMS

VALUES = "17,11,1,9;5,13,23,14;3,6,10,8;12,7,2,12"
WORKED_EXAMPLE = """
A 17 11 1 9    B 5 13 23 14   C 3 6 10 8     D 12 7 2 12
A _ 11 1 21    B 22 _ 23 14   C 3 19 _ 8     D 12 7 12 _
A _ 11 13 _    B _ _ 23 35    C 25 _ _ 8     D 12 26 _ _
A _ 37 _ _     B _ _ 36 _     C _ _ _ 43     D 37 _ _ _
A 37 37 _ _    B _ 37 36 _    C _ _ 36 43    D 37 _ _ 43
A 37 37 _ 43   B 37 37 36 _   C _ 37 36 43   D 37 _ 36 43
A 37 37 36 43  B 37 37 36 43  C 37 37 36 43  D 37 37 36 43
"""


def explain(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["explain", *arguments]) == 0
    return capsys.readouterr().out


def test_the_worked_example_of_the_ring(capsys: pytest.CaptureFixture[str]) -> None:
    text = explain(capsys, "ring", "--values", VALUES)
    picture = text[text.index("start:") :]
    for number in range(1, 7):
        assert f"step {number}: A" in picture
    words = [word for word in picture.split() if word not in ("start:", "step") and not word.endswith(":")]
    assert words == WORKED_EXAMPLE.split()


def test_the_table_the_traffic_and_the_cost(capsys: pytest.CaptureFixture[str]) -> None:
    text = explain(capsys, "ring", "--size", "4", "--bytes", "4KB", "--verify")
    assert "0→1 +3←3" in text
    assert "6144" in text  # bytes sent per rank
    assert "6 α + 3/2 n β + 3/4 n γ" in text
    assert text.rstrip().endswith("verified for 4 ranks")


def test_vectors_need_not_have_one_value_a_chunk(capsys: pytest.CaptureFixture[str]) -> None:
    text = explain(capsys, "recursive_doubling", "--values", VALUES)
    assert text.rstrip().endswith("D 37 37 36 43")
    text = explain(capsys, "ring", "--values", "1,2;3,4;5,6")
    assert text.rstrip().endswith("C  9 12")


def test_traffic_and_cost_are_those_of_the_values(capsys: pytest.CaptureFixture[str]) -> None:
    text = explain(capsys, "ring", "--values", VALUES)
    assert text.count("n = 32 B") == 1
    (row,) = [line.split() for line in text.splitlines() if line.startswith("0     6 ")]
    assert row == ["0", "6", "6", "48", "3/2", "48", "24"]
    assert "n = 1048576 B" in explain(capsys, "ring", "--values", VALUES, "--bytes", "1MB")
    assert "n = 1048576 B" in explain(capsys, "ring")


GOAL = """
rank 0 {
l0_0: recv 5b from 1 tag 0
l0_1: send 6b to 1 tag 0
l1_0: recv 6b from 1 tag 0
l1_1: send 5b to 1 tag 0
l1_0 requires l0_0
l1_0 requires l0_1
l1_1 requires l0_0
l1_1 requires l0_1
}
"""


@pytest.mark.parametrize("collective", ALGORITHMS)
def test_the_algorithms_of_a_collective_are_compared(capsys: pytest.CaptureFixture[str], collective: str) -> None:
    lines = explain(capsys, collective, "--size", "8", "--bytes", "64K").splitlines()
    first = lines.index(next(line for line in lines if line.startswith("algorithm "))) + 1
    rows = [line.split() for line in lines[first : lines.index("", first)]]
    assert {row[0] for row in rows} == set(ALGORITHMS[collective])
    times = [float(row[1]) for row in rows]
    assert times == sorted(times)


def test_goal(capsys: pytest.CaptureFixture[str]) -> None:
    text = explain(capsys, "ring", "--size", "2", "--goal", "--nbytes", "11")
    assert text.startswith("num_ranks 2\n" + GOAL)
    many = explain(capsys, "pipelined_ring", "--size", "3", "--goal")
    assert many.count("send") == many.count("recv") == 3 * 8
    assert "l2_0 requires l0_1" in many
    assert "requires l1_1" in many
    assert "l2_0 requires l1_1" not in many


def test_operand_order_can_be_seen(capsys: pytest.CaptureFixture[str]) -> None:
    assert "abcde" in explain(capsys, "tree", "--values", "a;b;c;d;e", "--op", "join")


@pytest.mark.parametrize("size", ["1", "2", "5", "8", "30"])
def test_every_algorithm_can_be_explained(capsys: pytest.CaptureFixture[str], size: str) -> None:
    for collective, table in ALGORITHMS.items():
        for name in table:
            assert name in explain(capsys, name, "--collective", collective, "--size", size)


def test_collectives_over_several_nodes_are_drawn_and_proved(capsys: pytest.CaptureFixture[str]) -> None:
    text = explain(capsys, "allreduce", "--algorithm", "hierarchy", "--bytes", "2MB", "--verify")
    assert "nodes   0 1 | 2 3\nlanes   0 2 | 1 3\n" in text
    assert "reduce_scatter inside the node (segment 1), while allreduce along the lane (segment 0) progresses" in text
    assert "verified for 4 ranks on 2 nodes" in text
    text = explain(capsys, "hierarchy", "--collective", "bcast", "--size", "7", "--ranks-per-node", "3")
    assert "nodes   0 1 2 | 3 4 5 | 6\nlanes   0 3 6\n" in text
    assert "bcast inside the node, on the root's node" in text
    for collective in ("reduce", "barrier", "allgather", "reduce_scatter"):
        assert collective in explain(capsys, "hierarchy", "--collective", collective, "--verify")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rings"], "there is no 'rings'; there are bruck"),
        (["rings"], "collectives are allreduce"),
        (["rings"], "tree, shared, single_copy, hierarchy, gatherv, scatterv; collectives are"),
        (["hierarchy", "--collective", "scan"], "hierarchy: there is none for scan; collectives are allreduce, reduce"),
        (["allgather", "--algorithm", "hierarchy", "--size", "5"], "--ranks-per-node: allgather needs nodes of equal"),
        (["hierarchy", "--collective", "bcast", "--root", "4"], "--root: 4 is not in 0..3"),
        (["bruck", "--collective", "allreduce"], "'bruck' is not one for allreduce"),
        (["ring", "--values", VALUES, "--size", "5"], "4 vectors were given for --size 5"),
        (["ring", "--rank", "9"], "--rank: 9"),
        (["ring", "--size", "100000"], "--size: 100000 ranks are more than 1024"),
        (["tree", "--collective", "bcast", "--root", "7"], "root: 7 is not in 0..3"),
        (["dissemination", "--values", VALUES], "a barrier moves no data"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["explain", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [["--size", "0"], ["--bytes", "much"], ["--values", "1,2;3"], ["--values", "1,;2,3"]]
)
def test_unreadable_arguments_end_with_status_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["explain", "ring", *arguments])
    assert end.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["--bogus"], "--bogus"), (["--bogus", "algorithms"], "--bogus"), ([], "COMMAND"), (["bogus"], "bogus")],
)
def test_what_is_no_command_is_named(capsys: pytest.CaptureFixture[str], arguments: list[str], named: str) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert named in capsys.readouterr().err.splitlines()[-1]


def test_all_algorithms_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["algorithms"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for table in ALGORITHMS.values() for name in table)


def test_neither_mpi_nor_numba_is_needed() -> None:
    code = (
        "import sys\n"
        "sys.modules['mpi4py'] = sys.modules['numba'] = sys.modules['numpy'] = None\n"
        "from mpicoll.__main__ import main\n"
        "sys.exit(main(['explain', 'ring', '--size', '3', '--verify']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("collective", ALGORITHMS)
@pytest.mark.parametrize("nbytes", ["8", "1MB"])
def test_every_plan_on_shared_memory_can_be_drawn(
    capsys: pytest.CaptureFixture[str], collective: str, nbytes: str
) -> None:
    for rank in range(3):
        text = explain(
            capsys, "shared", "--collective", collective, "--size", "3", "--rank", str(rank), "--bytes", nbytes
        )
        assert f"rank {rank}" in text
        assert "MEET" in text


def test_a_plan_on_shared_memory(capsys: pytest.CaptureFixture[str]) -> None:
    text = explain(capsys, "shared", "--size", "4", "--rank", "1")
    assert "REDUCE    recvbuf 1, tile <- sendbufs 0 + 1 + 2 + 3" in text
    assert "COPY      recvbuf, chunk 3 <- result stage 3, chunk 3" in text
    copied = explain(capsys, "single_copy", "--size", "4", "--rank", "1")
    assert "REDUCE    recvbuf 1, tile <- sendbufs 0 + 1 + 2 + 3" in copied
    assert "DELIVER   recvbuf 0, tile <- recvbuf 1, tile" in copied
    assert "stage" not in copied
    assert main(["explain", "shared", "--size", "4", "--rank", "4"]) == 2
    assert "--rank: 4 is not in 0..3" in capsys.readouterr().err
    assert explain(capsys, "allreduce", "--algorithm", "shared", "--rank", "1") == text
    assert main(["explain", "ring", "--algorithm", "shared"]) == 2
    assert "--algorithm is for the name of a collective, not ring" in capsys.readouterr().err
    proof = explain(capsys, "shared", "--collective", "bcast", "--size", "2", "--bytes", "8", "--verify")
    assert "do not wait, unless this call has not been compared before" in proof
    assert proof.rstrip().endswith("sequences of one and two operations, in every interleaving")


@pytest.mark.parametrize(
    ("line", "refused"),
    [
        ("allreduce --verify", "verify"),
        ("allreduce --rank 9", "rank"),
        ("allreduce --rank 0", "rank"),
        ("allreduce --algorithm shared --collective bcast", "collective"),
        ("shared --goal", "goal"),
        ("hierarchy --values 1;2", "values"),
        ("ring --goal --verify", "verify"),
        ("ring --ranks-per-node 2", "ranks-per-node"),
        ("ring --root 1", "root"),
        ("ring --root 0", "root"),
        ("allreduce --root 1", "root"),
        ("shared --root 1", "root"),
        ("hierarchy --root 1", "root"),
        ("ring --segments 3", "segments"),
        ("barrier --segments 3", "segments"),
        ("shared --segments 3", "segments"),
        ("hierarchy --segments 3", "segments"),
        ("gatherv --segments 3", "segments"),
        ("shared --alpha 1e-6", "alpha"),
        ("gatherv --beta 1e-6", "beta"),
        ("hierarchy --gamma 1e-6", "gamma"),
        ("ring --goal --beta 1e-6", "beta"),
    ],
)
def test_options_that_would_change_nothing_are_refused(
    capsys: pytest.CaptureFixture[str], line: str, refused: str
) -> None:
    assert main(["explain", *line.split()]) == 2
    assert f"--{refused} is not for " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["ring", "allreduce", "shared", "hierarchy", "gatherv"])
def test_an_operation_needs_values(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", name, "--op", "max"]) == 2
    assert capsys.readouterr().err == "mpicoll explain: --op has no meaning without --values\n"


def test_roots_and_segments_count_where_there_are_some(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(capsys, "bcast", "--root", "1") != explain(capsys, "bcast", "--root", "1", "--segments", "3")
    assert explain(capsys, "pipelined_ring", "--segments", "3") != explain(capsys, "pipelined_ring")
    shared = ("shared", "--collective", "bcast")
    assert explain(capsys, *shared, "--root", "1") != explain(capsys, *shared)


@pytest.mark.parametrize("kind", ["gatherv", "scatterv"])
def test_collectives_of_which_only_the_root_knows_the_counts(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = explain(capsys, kind, "--size", "3", "--root", "2", "--verify")
    assert "rank 2, the root" in text
    assert "rank 0\n" in text
    assert "verified for 3 ranks: 840 sequences" in text
    assert explain(capsys, kind, "--algorithm", "shared", "--rank", "1").count("rank 1\n") == 1
    assert main(["explain", "scatterv", "--size", "20", "--verify"]) == 2
    assert "16 ranks fit" in capsys.readouterr().err
    for wrong, named in (("--algorithm=ring", "--algorithm"), ("--root=7", "--root"), ("--goal", "--goal")):
        assert main(["explain", kind, wrong]) == 2
        assert named in capsys.readouterr().err


def test_an_interrupt_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("mpicoll.explain_command._explain", interrupted)
    assert main(["explain", "ring"]) == 130
    assert capsys.readouterr().err == "mpicoll explain: interrupted\n"
