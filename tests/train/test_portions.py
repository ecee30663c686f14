"""How models are cut for stages, and what stages do when, without ranks."""

import itertools

import pytest

from mpicoll.parallel import pipeline
from mpicoll.parallel.pipeline import most_in_flight, stage_bounds, turns

SHAPES = [(stages, count) for stages in (1, 2, 3, 4, 7) for count in (1, 2, 3, 6, 9)]


def times(schedule, stages, count):
    """When each stage takes each pass, if all take as long; raises if stages wait for each other for ever."""
    queues, done = [list(turns(schedule, stage, stages, count)) for stage in range(stages)], {}
    for time in range(4 * stages * (count + 1)):
        now = {}
        for stage, queue in enumerate(queues):
            forward, number = queue[0] if queue else (False, -1)
            before = (stage - 1, True, number) if forward else (stage + 1, False, number)
            if queue and (done.get(before) is not None or not 0 <= before[0] < stages):
                now[(stage, *queue.pop(0))] = time
        done |= now
    assert not any(queues)
    return done


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "count"), SHAPES)
def test_every_stage_takes_each_pass_once_without_more_idle_turns_than_stages_before_it(schedule, stages, count):
    found = times(schedule, stages, count)
    assert len(found) == 2 * stages * count
    assert max(found.values()) + 1 == 2 * (count + stages - 1)
    for stage in range(stages):
        assert [number for forward, number in turns(schedule, stage, stages, count) if not forward] == [*range(count)]
        assert all(found[stage, True, number] < found[stage, False, number] for number in range(count))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "count"), SHAPES)
def test_as_many_micro_batches_are_in_flight_as_stated(schedule, stages, count):
    for stage in range(stages):
        steps = [1 if forward else -1 for forward, _ in turns(schedule, stage, stages, count)]
        most = max(itertools.accumulate(steps))
        assert most == most_in_flight(schedule, stage, stages, count)
        assert most == (count if schedule == "gpipe" else min(count, stages - stage))


def test_the_drawing_shows_what_is_done():
    found, lines = times("1f1b", 4, 6), [[" "] * 18 for _ in range(4)]
    for (stage, forward, number), time in found.items():
        lines[stage][time] = str(number) if forward else "abcdef"[number]
    drawn = "\n".join(f"    stage {stage}   {' '.join(line).rstrip()}" for stage, line in enumerate(lines))
    assert drawn in pipeline.__doc__


@pytest.mark.parametrize("counts", [(5,), (1, 1, 1), (9, 1, 1, 1), (1, 1, 1, 9), (3, 1, 4, 1, 5, 9, 2), (0, 0, 7, 0)])
def test_the_largest_stage_is_as_small_as_can_be(counts):
    for stages in range(1, len(counts) + 1):
        bounds = stage_bounds(counts, stages)
        assert (bounds[0], bounds[-1], len(bounds)) == (0, len(counts), stages + 1)
        assert all(a < b for a, b in itertools.pairwise(bounds))

        def largest(bounds):
            return max(sum(counts[a:b]) for a, b in itertools.pairwise(bounds))

        every = ([0, *cuts, len(counts)] for cuts in itertools.combinations(range(1, len(counts)), stages - 1))
        assert largest(bounds) == min(map(largest, every))
