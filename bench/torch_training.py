"""The benchmark's training run in PyTorch: DistributedDataParallel over gloo."""

from __future__ import annotations

import importlib.util
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from bench import others
from mpicoll.train.config import TrainConfig

if TYPE_CHECKING:
    from mpi4py import MPI

    from bench.training_outcomes import Outcome
    from mpicoll.data.datasets import Dataset, Samples


def is_there() -> bool:
    """Say whether PyTorch is installed."""
    return importlib.util.find_spec("torch") is not None


def train(task: str, config: TrainConfig, comm: MPI.Intracomm) -> Outcome:
    """Train once with the options' model, order, batch, learning rates and initial weights; collective."""
    import torch

    from bench.torch_counterparts import Counterpart, loss_of
    from bench.training_outcomes import GOAL, TORCH, WARMUP_STEPS, Outcome, mean
    from mpicoll.data.datasets import load
    from mpicoll.data.sampler import batch_of_rank, epoch_order, steps_per_epoch
    from mpicoll.optim.learning_rate import learning_rate
    from mpicoll.train.model_choice import build_model

    torch.set_num_threads(1)
    dataset = load(config, comm)
    plain, loss = Counterpart(build_model(config, dataset), config.seed), loss_of(config.task)
    model = _distributed(plain, comm)
    groups = [
        {"params": [p for p in plain.parameters() if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in plain.parameters() if p.ndim == 1]},
    ]
    optimizer = torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    per_epoch = steps_per_epoch(dataset.train.count, config.batch)
    total = min(config.epochs * per_epoch, config.steps or config.epochs * per_epoch)
    seconds, samples, goal = 0.0, 0, None
    for step in range(total):
        began = time.perf_counter()
        if step % per_epoch == 0:
            order = epoch_order(dataset.train.count, config.seed, step // per_epoch)
        indices, count = batch_of_rank(order, step % per_epoch, config.batch, comm.Get_size(), comm.Get_rank())
        x, y = _batch(dataset.train, indices)
        optimizer.zero_grad(set_to_none=False)
        (loss(model(x), y) * (comm.Get_size() / count)).backward()  # gradients are averaged over ranks
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, total, config.lr, config.warmup, config.schedule)
        optimizer.step()
        if step >= WARMUP_STEPS:
            seconds, samples = seconds + time.perf_counter() - began, samples + count
        if (step + 1) % per_epoch == 0 and dataset.test.count and goal is None:
            goal = seconds if _accuracy(plain, dataset) >= GOAL else None
    accuracy = _accuracy(plain, dataset) if dataset.test.count else None
    return Outcome(task, TORCH, comm.Get_size(), samples / mean(comm, seconds), goal, accuracy)


def _distributed(model: Any, comm: MPI.Intracomm) -> Any:
    import torch

    if comm.Get_size() == 1:
        return model
    if not torch.distributed.is_initialized():
        others.start_gloo(comm)
    return torch.nn.parallel.DistributedDataParallel(model)


def _batch(samples: Samples, indices: np.ndarray) -> tuple[Any, Any]:
    import torch

    x, y = samples.batch(indices)
    return torch.from_numpy(x), torch.from_numpy(y)


def _accuracy(model: Any, dataset: Dataset) -> float:
    import torch

    x, y = _batch(dataset.test, np.arange(dataset.test.count))
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())
