import numpy as np
import pytest
from mpi4py import MPI

import mpicoll.train
from mpicoll.train import ArrayDataset, Callback, DataError, EarlyStopping, Trainer, UsageError
from mpicoll.train.tally import EpochRecord
from tests.own_models import CLASSES, FEATURES, Softmax, samples

PLAIN = {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, "warmup": 0, "schedule": "constant"}


def trainer(**options):
    return Trainer(Softmax(), samples(200), comm=MPI.COMM_SELF, **options)


def test_steps_are_those_of_gradient_descent():
    made = trainer(epochs=3, batch=200, **PLAIN)
    result = made.fit()
    model, data = Softmax(), samples(200)
    expected = [array.copy() for array in model.initial(0)]
    for _ in range(3):
        loss, hits, saved = model.forward(expected, data.x, data.y)
        for parameter, gradient in zip(expected, model.backward(expected, saved), strict=True):
            parameter -= 0.1 * gradient / 200
    for parameter, wanted in zip(made.parameters, expected, strict=True):
        np.testing.assert_allclose(parameter, wanted, rtol=1e-5, atol=1e-6)
    assert result["steps"] == 3
    assert result["epochs"][-1]["train_loss"] == pytest.approx(loss / 200, rel=1e-5)
    assert result["epochs"][-1]["train_accuracy"] == hits / 200
    assert (result["test_loss"], result["test_accuracy"]) == (None, None)


def test_accumulated_batches_are_one_large_batch():
    whole, parts = trainer(epochs=2, batch=100, **PLAIN), trainer(epochs=2, batch=50, accumulate=2, **PLAIN)
    assert whole.fit()["steps"] == parts.fit()["steps"] == 4
    for one, other in zip(whole.parameters, parts.parameters, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_callbacks_see_steps_and_epochs_and_may_stop():
    class Log(Callback):
        def __init__(self):
            self.steps, self.epochs = [], []

        def on_step(self, trainer, record):
            self.steps.append(record.step)

        def on_epoch(self, trainer, record):
            self.epochs.append(record)
            if len(self.epochs) == 2:
                trainer.stop()

    log = Log()
    result = Trainer(
        Softmax(), samples(300), test_data=samples(100, seed=4), comm=MPI.COMM_SELF, epochs=50, callbacks=[log]
    ).fit()
    assert [record.epoch for record in log.epochs] == [0, 1]
    assert log.epochs[1].test_loss < log.epochs[0].test_loss
    assert result["stopped"]
    assert log.steps == list(range(len(log.steps)))
    assert result["steps"] < 50 * 5


def test_early_stopping_waits_for_so_many_evaluations():
    class Stopped:
        count = 0

        def stop(self):
            self.count += 1

    stopping, stopped = EarlyStopping(patience=2, min_delta=0.1), Stopped()
    for loss, stops in ((1.0, 0), (0.95, 0), (None, 0), (0.5, 0), (0.45, 0), (0.45, 1)):
        stopping.on_epoch(stopped, EpochRecord(0, 1, None, None, loss, None, 0.0, 0.0))
        assert stopped.count == stops, loss


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"strategy": "magic"}, UsageError, "strategy: 'magic' is not one of replicated"),
        ({"lr": -1}, UsageError, "lr"),
        ({"learning_rate": 1}, TypeError, "learning_rate: there is no such option; there are"),
        ({"tensor": 2}, TypeError, "tensor: models of one's own have no layers"),
        ({"dataset": "digits"}, TypeError, "dataset: there is no such option"),
        ({"warmup_dense": 3}, UsageError, "warmup_dense has no meaning without compression"),
        ({"strategy": "sharded", "compression": "int8"}, UsageError, "compression is for shard none"),
        ({"strategy": "gossip", "staleness": 3}, UsageError, "staleness is for mode ps"),
        ({"epochs": 0}, UsageError, "epochs"),
    ],
)
def test_options_are_refused_as_on_the_command_line(options, error, text):
    with pytest.raises(error, match=text):
        trainer(**options)


def test_models_and_data_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="x: 3 samples do not fit 4 targets"):
        ArrayDataset(np.zeros((3, 2)), np.zeros(4))
    with pytest.raises(DataError, match=r"model: initial\(0\) gives .*'int64'\]; parameters are all"):
        Trainer(Softmax("int64"), samples(10))

    class Short(ArrayDataset):
        def batch(self, indices):
            x, y = super().batch(indices)
            return x[1:], y

    with pytest.raises(DataError, match="batch gives 63 and 64 rows for 64 indices"):
        Trainer(Softmax(), Short(*vars(samples(100)).values()), comm=MPI.COMM_SELF).fit()

    class Wrong(Softmax):
        def backward(self, parameters, saved):
            return super().backward(parameters, saved)[::-1]

    with pytest.raises(DataError, match="backward gives shapes"):
        Trainer(Wrong(), samples(100), comm=MPI.COMM_SELF).fit()


def test_float64_is_trained_in_float64():
    made = Trainer(Softmax("float64"), samples(100, "float64"), comm=MPI.COMM_SELF, epochs=1)
    made.fit()
    assert [array.dtype for array in made.parameters] == [np.float64] * 2
    assert [array.shape for array in made.parameters] == [(FEATURES, CLASSES), (CLASSES,)]
    with pytest.raises(UsageError, match="compression is for dtype float32"):
        Trainer(Softmax("float64"), samples(100), compression="int8")


def test_the_package_shows_its_names_before_anything_is_imported():
    assert {"Trainer", "ArrayDataset", "TrainableModel"} <= set(dir(mpicoll.train))
    with pytest.raises(AttributeError, match="no attribute 'Trainr'"):
        mpicoll.train.Trainr  # noqa: B018
