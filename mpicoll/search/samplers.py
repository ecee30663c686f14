"""Samplers and pruners of Optuna by name."""

from __future__ import annotations

import importlib.util
import warnings

import optuna

from mpicoll.errors import UsageError


def make_sampler(name: str, seed: int) -> optuna.samplers.BaseSampler:
    """Return a sampler; that of ``"grid"``, whose points are enqueued, serves parameters that they lack.

    Raises
    ------
    UsageError
        If there is none of that name, or a package that it needs is missing.
    """
    samplers = optuna.samplers
    if name in ("random", "grid"):
        return samplers.RandomSampler(seed=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        if name == "tpe":
            # Trials that run at the same time count as bad ones, so that the next does not take the same values.
            return samplers.TPESampler(seed=seed, constant_liar=True)
        if name == "cmaes":
            if importlib.util.find_spec("cmaes") is None:
                raise UsageError('--sampler cmaes needs the package cmaes: pip install "mpicoll[search]"')
            return samplers.CmaEsSampler(seed=seed, warn_independent_sampling=False)
    raise UsageError(f"--sampler {name}: not one of random, grid, tpe, cmaes")


def make_pruner(name: str, most: int | None = None, reduction: int = 3) -> optuna.pruners.BasePruner:
    """Return a pruner.

    Parameters
    ----------
    most
        Largest number of reports of a trial, for ``"hyperband"``; None if it is not known.
    reduction
        Factor between the numbers of reports at which ``"asha"`` and ``"hyperband"`` compare trials; of those that have
        come so far one in `reduction` goes on.

    Raises
    ------
    UsageError
        If there is none of that name.
    """
    pruners = optuna.pruners
    if name == "none":
        return pruners.NopPruner()
    if name == "median":
        return pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=1)
    if name == "asha":
        return pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=reduction)
    if name == "hyperband":
        return pruners.HyperbandPruner(min_resource=1, max_resource=most or "auto", reduction_factor=reduction)
    raise UsageError(f"--pruner {name}: not one of none, asha, hyperband, median")
