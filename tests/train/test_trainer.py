import numpy as np
import pytest
from mpi4py import MPI

import mpicoll.train
from mpicoll.train import (
    ArrayDataset,
    Callback,
    DataError,
    EarlyStopping,
    LocalSGD,
    NonFiniteLoss,
    ParameterServer,
    Trainer,
    UsageError,
)
from mpicoll.train.metrics import EpochRecord
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


@pytest.mark.parametrize("callbacks", [3, [3], [mpicoll.train.EarlyStopping], [mpicoll.train.Callback(), None]])
def test_wrong_callbacks_are_refused(callbacks):
    with pytest.raises(TypeError, match=r"^callbacks: .* is not "):
        mpicoll.train.Trainer(Softmax(), samples(20), callbacks=callbacks)


@pytest.mark.parametrize(
    ("model", "data", "test_data", "message"),
    [
        (object(), samples(8), None, "model: .* has no method initial"),
        (Softmax(), 3, None, "data: 3 has no len"),
        (Softmax(), [1, 2], None, r"data: \[1, 2\] has no len"),
        (Softmax(), samples(8), 3, "test_data: 3 has no len"),
    ],
)
def test_models_and_data_that_lack_a_method_are_named(model, data, test_data, message):
    with pytest.raises(TypeError, match=message):
        Trainer(model, data, test_data=test_data, comm=MPI.COMM_SELF)


def test_algorithms_are_those_of_the_collectives_that_are_used():
    with pytest.raises(UsageError, match=r"'pairwise' is not one of auto, .*, noop"):
        trainer(algorithm="pairwise").fit()
    trainer(algorithm="pairwise", strategy="sharded", epochs=1, quiet=True).fit()


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
    assert [record.epoch for record in log.epochs] == [0, 1, 2]  # it stops where the next epoch ends
    assert log.epochs[1].test_loss < log.epochs[0].test_loss
    assert result["stopped"]
    assert log.steps == list(range(len(log.steps)))
    assert result["steps"] < 50 * 5


def test_callbacks_see_checkpoints_and_the_end(tmp_path):
    class Log(Callback):
        def __init__(self):
            self.saved, self.results = [], []

        def on_checkpoint(self, trainer, steps):
            self.saved.append(steps)

        def on_end(self, trainer, result):
            self.results.append((result, len(trainer.parameters)))

    log = Log()
    options = {"batch": 50, "steps": 11, "checkpoint": str(tmp_path / "run"), "checkpoint_every": 5}
    result = trainer(callbacks=[log], **options).fit()
    assert log.saved == [5, 10, 11]
    assert log.results == [(result, 2)]


def test_early_stopping_waits_for_so_many_evaluations():
    class Stopped:
        count = 0

        def stop(self):
            self.count += 1

    stopping, stopped = EarlyStopping(patience=2, min_delta=0.1), Stopped()
    for loss, stops in ((1.0, 0), (0.95, 0), (None, 0), (0.5, 0), (0.45, 0), (0.45, 1)):
        stopping.on_epoch(stopped, EpochRecord(0, 1, None, None, loss, None, 0.0, 0.0))
        assert stopped.count == stops, loss


def test_early_stopping_compares_with_the_last_improvement_and_begins_anew():
    class Never:
        def stop(self):
            raise AssertionError("it improves")

    def record(loss):
        return EpochRecord(0, 1, None, None, loss, None, 0.0, 0.0)

    stopping = EarlyStopping(patience=3, min_delta=0.1)
    for loss in (1.0, 0.92, 0.84, 0.76, 0.68):
        stopping.on_epoch(Never(), record(loss))
    assert stopping.best == 0.68
    stopping.on_start(Never(), [])
    assert (stopping.best, stopping.waited) == (np.inf, 0)
    stopping.on_start(Never(), [record(0.5), record(0.6), record(0.7)])
    assert (stopping.best, stopping.waited) == (0.5, 2)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"strategy": "magic"}, UsageError, "strategy: 'magic' is not one of replicated"),
        ({"lr": -1}, UsageError, "lr"),
        ({"learning_rate": 1}, TypeError, "learning_rate: not an option; the options are"),
        ({"tensor": 2}, TypeError, "tensor: not an option for user-defined models"),
        ({"dataset": "digits"}, TypeError, "dataset: not an option"),
        ({"warmup_dense": 3}, UsageError, "warmup_dense has no meaning without compression"),
        ({"strategy": "sharded", "compression": "sign"}, UsageError, "compression sign is not for strategy='sharded'"),
        (
            {"strategy": "gossip", "staleness": 3},
            UsageError,
            "staleness is for strategy='parameter_server', not gossip",
        ),
        ({"epochs": 0}, UsageError, "^epochs: '0' is not a whole number"),
        (
            {"optimizer": "sgd", "momentum": 0.9},
            UsageError,
            "^momentum is for optimizer momentum or lars, not sgd",
        ),
        (
            {"strategy": "gossip", "bucket_bytes": 65536},
            UsageError,
            "^bucket_bytes is for ranks that take steps together, not strategy='gossip'",
        ),
        (
            {"strategy": ParameterServer(staleness=0, damping=True)},
            UsageError,
            "^damping has no meaning with staleness 0",
        ),
        ({"strategy": LocalSGD(0)}, UsageError, "^sync_every: '0'"),
        ({"seed": -1}, UsageError, "^seed: '-1' is not a whole number of at least 0"),
        ({"strategy": ParameterServer(), "servers": 2}, TypeError, "servers: given to Trainer and to ParameterServer"),
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

    with pytest.raises(DataError, match="batch gives 1 and 2 rows for 2 indices"):
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


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (0.5, "forward gives a float, not a tuple of loss"),
        ((1.0, 2), "forward gives a tuple of 2, not a tuple of loss"),
        ((np.ones(3), 0, ()), r"forward gives an array of float64 and shape \(3,\) as loss, not a number summed"),
        ((1j, 0, ()), "forward gives a complex as loss"),
        ((1.0, None, ()), "forward gives a NoneType as number of hits"),
    ],
)
def test_a_wrong_result_of_forward_is_named(result, says):
    class Wrong(Softmax):
        def forward(self, parameters, x, y):
            return result

    with pytest.raises(DataError, match=says):
        Trainer(Wrong(), samples(100), comm=MPI.COMM_SELF).fit()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda found: found[0], "backward gives an array of float32 and shape .*, not a list of 2 gradients"),
        (lambda found: None, "backward gives a NoneType, not a list of 2 gradients"),
        (lambda found: (found[0], None), "backward gives shapes"),
        (
            lambda found: (found[0], found[1] + 1j),
            "backward gives an array of complex64 .* for parameter 1, not an array",
        ),
        (lambda found: (found[0].astype(object), found[1]), "backward gives an array of object .* for parameter 0"),
    ],
)
def test_a_wrong_result_of_backward_is_named(change, says):
    class Wrong(Softmax):
        def backward(self, parameters, saved):
            return change(super().backward(parameters, saved))

    with pytest.raises(DataError, match=says):
        Trainer(Wrong(), samples(100), comm=MPI.COMM_SELF).fit()


def test_numbers_of_any_kind_and_other_floats_are_taken():
    class Numbers(Softmax):
        def forward(self, parameters, x, y):
            loss, hits, saved = super().forward(parameters, x, y)
            return np.float32(loss), np.array(hits), saved

        def backward(self, parameters, saved):
            return [gradient.astype(np.float64) for gradient in super().backward(parameters, saved)]

    assert Trainer(Numbers(), samples(200), comm=MPI.COMM_SELF, epochs=5).fit()["train_loss"] < 1


def test_a_regression_is_reported_by_its_loss(capsys):
    class Regression(Softmax):
        def forward(self, parameters, x, y):
            loss, _, saved = super().forward(parameters, x, y)
            return loss, 0, saved

    result = Trainer(
        Regression(),
        samples(100),
        test_data=samples(50, seed=4),
        comm=MPI.COMM_SELF,
        epochs=2,
        quiet=False,
        progress=False,
    ).fit()
    text = capsys.readouterr().out
    assert text.startswith(f"test loss {result['test_loss']:.4f}, train loss")
    assert "accuracy" not in text


def test_errors_of_a_run_name_arguments():
    with pytest.raises(NonFiniteLoss, match="try a lower lr or a longer warmup"):
        trainer(lr=1e30, warmup=0).fit()


def test_numbers_of_numpy_are_options():
    options = {"epochs": 2, "batch": 50, "lr": 0.1, "clip": 0.5}
    kinds = (np.int64, np.int32, np.float64, np.float64)
    given = {name: kind(options[name]) for name, kind in zip(options, kinds, strict=True)}
    wanted, found = trainer(**options).fit(), trainer(**given).fit()
    assert found["parameters_sha256"] == wanted["parameters_sha256"]


def test_gradients_are_clipped_before_weight_decay_with_every_strategy():
    """On one rank they are the same method."""
    options = {"epochs": 2, "batch": 50, "clip": 0.1, "lr": 0.1, "weight_decay": 0.2}
    wanted, found = trainer(**options), trainer(strategy="gossip", **options)
    wanted.fit()
    found.fit()
    for one, other in zip(wanted.parameters, found.parameters, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
