"""Parts of asynchronous training that need no launcher."""

from dataclasses import replace

import numpy as np
import pytest

from mpicoll.errors import UsageError
from mpicoll.models.builders import perceptron
from mpicoll.optim.optimizers import OPTIMIZERS
from mpicoll.train.assembly import check_ranks
from mpicoll.train.asynchronous import replica as replicas
from mpicoll.train.asynchronous.placed_optimizer import PlacedOptimizer
from mpicoll.train.config import TrainConfig


def test_a_rank_shows_that_it_is_alive_between_layers(monkeypatch):
    beats, model = [], perceptron((5, 4, 3), np.float32)
    parameters = model.initial(0)
    replica = replicas.Replica(model.layout, parameters, np.zeros_like(parameters), lambda: beats.append(1))
    x, y = np.ones((2, 5), np.float32), np.zeros(2, np.int64)
    monkeypatch.setattr(replicas, "_BEAT_SECONDS", 1e9)
    model.loss_and_gradient(replica, x, y)
    assert not beats
    monkeypatch.setattr(replicas, "_BEAT_SECONDS", -1)
    model.loss_and_gradient(replica, x, y)
    assert len(beats) == 4


class Workers:
    """Some workers that all have the same gradients, and whoever applies them."""

    def __init__(self, config, workers):
        self.parameters = np.zeros(3, np.float32)
        together = workers if config.mode == "ps" and config.staleness == 0 else 1
        self.momenta = [PlacedOptimizer(config, self.parameters, workers, together) for _ in range(workers)]
        kind = OPTIMIZERS[self.momenta[0].optimizer]
        self._optimizer = kind(self.parameters, {**kind.defaults, **self.momenta[0].hyper})
        self._together = together

    def take_steps(self, steps, slope=lambda step: 1.0):
        """Each worker sends its share of a gradient whose elements are equal, 1 unless told otherwise."""
        for step in range(steps):
            share = np.full(3, slope(step) / len(self.momenta), np.float32) * np.float32(self.momenta[0].scale)
            for momentum in self.momenta[:: self._together]:
                sent = momentum.applied(share) * self._together
                for other in self.momenta[1 : self._together]:
                    other.applied(share)
                self._optimizer.apply(sent, 0.1 * momentum.factor)

    def save(self):
        steps = {"steps": np.array([self._optimizer.steps])} if self._optimizer.depends_on_steps else {}
        return self.momenta[0].saved({"parameters": self.parameters.copy(), **steps, **self._optimizer.state})

    def load(self, state):
        for momentum in self.momenta:
            kept = momentum.restored(state)
        for name, vector in self._optimizer.state.items():
            vector[:] = kept[name]
        if self._optimizer.depends_on_steps:
            self._optimizer.steps = int(kept.pop("steps")[0])
        assert set(kept) == {"parameters", *self._optimizer.state}


WAYS = {
    "sync": {"mode": "ps", "staleness": 0},
    "async": {"mode": "ps", "staleness": None},
    "fed back": {"mode": "ps", "staleness": 0, "compression": "sign"},
    "p2p": {"mode": "p2p"},
}


@pytest.mark.parametrize("second", WAYS)
@pytest.mark.parametrize("first", WAYS)
@pytest.mark.parametrize("workers", [(3, 3), (2, 5), (4, 1)])
def test_a_velocity_moves_to_whoever_keeps_it(first, second, workers):
    """With equal gradients it is the same in the units of synchronous training, wherever it is kept."""
    begun = Workers(replace(TrainConfig(), **WAYS[first]), workers[0])
    begun.take_steps(30)
    state = begun.save()
    expected = (1 - 0.9**30) / (1 - 0.9)
    np.testing.assert_allclose(state["velocity"], expected, rtol=0.1)
    going_on = Workers(replace(TrainConfig(), **WAYS[second]), workers[1])
    going_on.load(state)
    np.testing.assert_allclose(going_on.save()["velocity"], state["velocity"], rtol=1e-5)
    before = going_on.parameters.copy()
    going_on.take_steps(1)
    np.testing.assert_allclose(before - going_on.parameters, 0.1 * (0.9 * expected + 1), rtol=0.1)


def test_a_velocity_of_synchronous_training_is_kept_to_the_bit():
    begun = Workers(replace(TrainConfig(), **WAYS["sync"]), 3)
    begun.take_steps(7)
    state = begun.save()
    again = Workers(replace(TrainConfig(), **WAYS["sync"]), 3)
    again.load(state)
    np.testing.assert_array_equal(again.save()["velocity"], begun._optimizer.state["velocity"])


ADAPTIVE = ("adam", "adagrad")
FREE = ("async", "p2p")


def wave(step):
    return 1 + 0.5 * np.sin(step)


@pytest.mark.parametrize("way", FREE)
@pytest.mark.parametrize("optimizer", ADAPTIVE)
def test_updates_of_a_step_are_as_long_as_the_step(optimizer, way):
    """However many workers share it, and with the state that the step has in synchronous training."""
    config = replace(TrainConfig(), optimizer=optimizer)
    alone = Workers(replace(config, **WAYS["sync"]), 1)
    together, free = Workers(replace(config, **WAYS["sync"]), 5), Workers(replace(config, **WAYS[way]), 5)
    for workers in (alone, together, free):
        workers.take_steps(400, wave)
    np.testing.assert_allclose(together.parameters, alone.parameters, rtol=1e-5)
    np.testing.assert_allclose(free.parameters, alone.parameters, rtol=0.05)
    for name, vector in alone._optimizer.state.items():
        np.testing.assert_allclose(free._optimizer.state[name], vector, rtol=0.05, err_msg=name)


@pytest.mark.parametrize("way", FREE)
def test_a_step_of_adam_has_its_length_from_the_first_one_on(way):
    free = Workers(replace(TrainConfig(), optimizer="adam", **WAYS[way]), 5)
    free.take_steps(1)
    np.testing.assert_allclose(free.parameters, -0.1, rtol=1e-3)


@pytest.mark.parametrize(
    ("first", "second"), [("async", "sync"), ("sync", "p2p"), ("p2p", "async"), ("async", "async")]
)
@pytest.mark.parametrize("workers", [(4, 4), (2, 6), (6, 1)])
def test_adam_goes_on_with_other_workers_as_if_nothing_had_happened(first, second, workers):
    config = replace(TrainConfig(), optimizer="adam")
    alone = Workers(replace(config, **WAYS["sync"]), 1)
    begun = Workers(replace(config, **WAYS[first]), workers[0])
    going_on = Workers(replace(config, **WAYS[second]), workers[1])
    alone.take_steps(50)
    begun.take_steps(50)
    going_on.load(begun.save())
    before = alone.parameters.copy()
    alone.take_steps(20, lambda step: 2.0)
    going_on.take_steps(20, lambda step: 2.0)
    np.testing.assert_allclose(going_on.parameters, alone.parameters - before, rtol=0.05)


@pytest.mark.parametrize("others", [{"servers": 2}, {"spares": 2}])
def test_ranks_that_take_no_steps_cannot_be_slow(others):
    check_ranks(replace(TrainConfig(), slow=((3, 2.0),), **others), 6)
    with pytest.raises(UsageError, match="--slow 4: not a rank that takes steps; these are 0 to 3"):
        check_ranks(replace(TrainConfig(), slow=((3, 2.0), (4, 2.0)), **others), 6)
