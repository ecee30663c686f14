"""Parts of asynchronous training that need no launcher."""

from dataclasses import replace

import numpy as np
import pytest

from mpicoll.models.builders import perceptron
from mpicoll.optim.optimizers import OPTIMIZERS
from mpicoll.train.asynchronous import replica as replicas
from mpicoll.train.asynchronous.placed_momentum import PlacedMomentum
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
        self.momenta = [PlacedMomentum(config, self.parameters, workers, together) for _ in range(workers)]
        kind = OPTIMIZERS[self.momenta[0].optimizer]
        self._optimizer = kind(self.parameters, {**kind.defaults, **self.momenta[0].hyper})
        self._together = together

    def take_steps(self, steps):
        """Each worker sends its share of a gradient of ones."""
        share = np.full(3, 1 / len(self.momenta), np.float32)
        for _ in range(steps):
            for momentum in self.momenta[:: self._together]:
                sent = momentum.applied(share) * self._together
                for other in self.momenta[1 : self._together]:
                    other.applied(share)
                self._optimizer.apply(sent, 0.1 * momentum.factor)

    def save(self):
        return self.momenta[0].saved({"parameters": self.parameters.copy(), **self._optimizer.state})

    def load(self, state):
        for momentum in self.momenta:
            kept = momentum.restored(state)
        for name, vector in self._optimizer.state.items():
            vector[:] = kept[name]
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
