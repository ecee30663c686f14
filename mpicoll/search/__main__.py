"""Search for the trainer's options on groups of ranks.

    mpirun -n 8 python -m mpicoll.search --space lr=log:1e-3..1 batch=32,64,128 --trials 32 --epochs 10
    mpirun -n 8 python -m mpicoll.search --group 2 --pruner asha --storage study.journal --space lr=log:1e-3..1
    mpirun -n 8 python -m mpicoll.search --population 16 --space lr=log:1e-3..1 --epochs 30
    mpirun -n 8 python -m mpicoll.search --help

Exit status: 0; 1 if the study could not start or go on, or all its trials have failed; 2 if the options are wrong; 130
after an interrupt. NumPy and Numba are imported inside the functions, after the number of threads is chosen.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpicoll.errors import TrainingError
from mpicoll.quantities import counted
from mpicoll.search.search_options import METRICS, SearchOptions, parse_search
from mpicoll.search.study_settings import StudySettings
from mpicoll.train.command_line import run_on_all_ranks
from mpicoll.train.run_report import say

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpicoll.search.study_run import StudyResult
    from mpicoll.search.trainer_objective import TrainerObjective


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status.

    What goes wrong on all ranks is said once, in one line, by rank 0. What goes wrong on one rank is said by that rank,
    and ends the job; a study with a storage can go on afterwards.
    """
    arguments = sys.argv[1:] if argv is None else argv
    return run_on_all_ranks(lambda world: _run(parse_search(arguments), world))


def _run(options: SearchOptions, world: MPI.Intracomm) -> None:
    if options.population is not None:
        _run_population(options, world)
    else:
        _run_study(options, world)


def _run_population(options: SearchOptions, world: MPI.Intracomm) -> None:
    from mpicoll import Intracomm
    from mpicoll.consensus import all_succeed
    from mpicoll.search.population_report import PLOT, PopulationTable, publish
    from mpicoll.search.population_run import train_population
    from mpicoll.search.population_settings import PopulationSettings
    from mpicoll.search.study_report import check_outputs
    from mpicoll.search.trainer_member import TrainerPopulation, check_best, population_facts, save_best

    source = TrainerPopulation(options)
    all_succeed(world, lambda: check_outputs(options, [PLOT]) if world.rank == 0 else None)
    all_succeed(world, lambda: check_best(options.best) if world.rank == 0 else None)
    settings = PopulationSettings(
        space=options.space,
        members=options.population or 0,
        generations=source.generations,
        direction=METRICS[options.metric],
        quantile=options.quantile,
        seed=options.sampler_seed,
        storage=options.storage,
        facts=population_facts(options.trainer, options.metric, options.interval),
    )
    table = PopulationTable(options, source.generations)
    try:
        result = train_population(source.member, settings, world, options.group, source.config.timeout, table.add)
    finally:
        table.close()
    if options.best is not None and not result.stopped:
        save_best(options.best, result, Intracomm(world, timeout=source.config.timeout))
    if world.rank == 0:
        publish(result, options)


def _run_study(options: SearchOptions, world: MPI.Intracomm) -> None:
    from mpicoll.consensus import all_succeed
    from mpicoll.search.search_space import grid
    from mpicoll.search.study_report import PLOTS, TrialTable, check_outputs
    from mpicoll.search.study_run import run_study
    from mpicoll.search.trainer_objective import TrainerObjective

    objective = TrainerObjective(options.trainer, options.space, options.metric)
    all_succeed(world, lambda: check_outputs(options, [f"{name}.png" for name in PLOTS]) if world.rank == 0 else None)
    points = None
    if options.sampler == "grid":
        points = list(grid(options.space, objective.defaults, options.points))
        random.Random(options.sampler_seed).shuffle(points)  # pruners compare with trials that have come before
    config = objective.config
    settings = StudySettings(
        trials=options.trials,
        direction=METRICS[options.metric],
        sampler=options.sampler,
        pruner=options.pruner,
        reduction=options.reduction,
        most_reports=config.epochs,
        storage=options.storage,
        name=options.study,
        seed=options.sampler_seed,
        grid=points,
        facts={"metric": options.metric, "group": str(options.group), "trainer": " ".join(options.trainer)},
    )
    total = options.trials
    if points is not None:
        total = min(options.trials or len(points), len(points))
        if options.trials is not None and total < options.trials and world.rank == 0 and not options.quiet:
            say(f"--trials {options.trials}: the grid has {counted(total, 'point')}, and each is run once")
    table = TrialTable(options, total)
    try:
        result = run_study(objective, None, settings, world, options.group, config.timeout, table.add)
    finally:
        table.close()
    if result.study is not None:
        _publish(result, options, objective)
    if result.best_number is None and result.counts["failed"]:
        failed = result.counts["failed"]
        raise TrainingError(
            f"{counted(failed, 'trial')} {'has' if failed == 1 else 'have'} failed, and none is complete"
        )


def _publish(result: StudyResult, options: SearchOptions, objective: TrainerObjective) -> None:
    from mpicoll.search.coordinator import record_of
    from mpicoll.search.study_report import draw, summary_of, write_results

    assert result.study is not None
    best = result.best_number
    command = "" if best is None else objective.command(result.best_params, best, options.group)
    if not options.quiet:
        say(summary_of(result, options.metric))
    if command:
        say(command)
    trials = [trial for trial in result.study.get_trials(deepcopy=False) if trial.state.is_finished()]
    if options.json is not None:
        write_results(options.json, result, command, [(record_of(trial), trial.user_attrs) for trial in trials])
    if options.plot is not None:
        draw(result.study, options.plot)


if __name__ == "__main__":
    sys.exit(main())
