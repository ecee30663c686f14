"""Parts of asynchronous training that need no launcher."""

import numpy as np

from mpicoll.train.models import perceptron
from mpicoll.train.modes import loop


def test_a_rank_shows_that_it_is_alive_between_layers(monkeypatch):
    beats, model = [], perceptron((5, 4, 3), np.float32)
    parameters = model.initial(0)
    replica = loop.Replica(model.layout, parameters, np.zeros_like(parameters), lambda: beats.append(1))
    x, y = np.ones((2, 5), np.float32), np.zeros(2, np.int64)
    monkeypatch.setattr(loop, "_BEAT_SECONDS", 1e9)
    model.loss_and_gradient(replica, x, y)
    assert not beats
    monkeypatch.setattr(loop, "_BEAT_SECONDS", -1)
    model.loss_and_gradient(replica, x, y)
    assert len(beats) == 4
