import numpy as np
import pytest
from mpi4py import MPI

from mpicoll.data.datasets import load
from mpicoll.errors import DataError
from mpicoll.train.options import parse


def open_set(*options):
    return load(parse(options), MPI.COMM_SELF)


def everything(samples, features, dtype=np.float32):
    x, y = samples.batch(np.arange(samples.count))
    assert x.shape == (samples.count, features)
    return x.astype(dtype), y.copy()


def test_digits_are_split_without_overlap_and_scaled():
    found = open_set("--dataset", "digits")
    assert (found.train.count, found.test.count) == (1438, 359)
    assert (found.feature_count, found.class_count, found.image_shape) == (64, 10, (8, 8, 1))
    x, y = everything(found.train, 64)
    assert (x.min(), x.max()) == (0, 1)
    assert set(y) == set(range(10))
    from sklearn.datasets import load_digits

    test_x, test_y = everything(found.test, 64)
    ours = np.column_stack([np.concatenate([x, test_x]) * 16, np.concatenate([y, test_y])])
    theirs = np.column_stack([load_digits().data, load_digits().target])
    np.testing.assert_array_equal(ours[np.lexsort(ours.T)], theirs[np.lexsort(theirs.T)])


def test_split_depends_on_the_seed_and_fraction():
    first, second = (everything(open_set("--seed", seed).test, 64)[0] for seed in "12")
    assert (first != second).any()
    assert open_set("--test-fraction", "0").test.count == 0


def test_npz_with_its_own_test_part(tmp_path):
    x = np.arange(48, dtype=np.uint8).reshape(6, 2, 4)
    np.savez(tmp_path / "d.npz", x_train=x, y_train=[0, 1, 2, 0, 1, 2], x_test=x[:2], y_test=np.array([[3], [0]]))
    found = open_set("--dataset", str(tmp_path / "d.npz"))
    assert (found.train.count, found.test.count, found.class_count) == (6, 2, 4)
    assert found.image_shape == (2, 4, 1)
    np.testing.assert_allclose(everything(found.train, 8)[0], x.reshape(6, 8) / 255, rtol=1e-6)


def test_mapped_npy(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(50.0).reshape(10, 5))
    np.save(tmp_path / "y.npy", np.arange(10) % 3)
    found = open_set("--dataset", str(tmp_path / "x.npy"), "--labels", str(tmp_path / "y.npy"))
    x, y = everything(found.train, 5, np.float64)
    np.testing.assert_array_equal(y, x[:, 0] / 5 % 3)
    assert found.image_shape is None


BAD = {
    "labels-too-few": (np.zeros((4, 2)), np.zeros(3, int), "one label to each of 4"),
    "labels-negative": (np.zeros((4, 2)), np.array([0, 1, -1, 0]), "label -1 is not in"),
    "labels-huge": (np.zeros((4, 2)), np.array([0, 1, 2**62, 0]), "is not in"),
    "labels-floats": (np.zeros((4, 2)), np.zeros(4), "labels are integers"),
    "one-dimension": (np.zeros(4), np.zeros(4, int), "is not"),
    "five-dimensions": (np.zeros((4, 1, 1, 1, 1)), np.zeros(4, int), "is not"),
    "no-samples": (np.zeros((0, 4)), np.zeros(0, int), "is not"),
    "no-features": (np.zeros((4, 0)), np.zeros(4, int), "is not"),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("mapped", [False, True])
def test_arrays_that_do_not_fit_are_refused(tmp_path, kind, mapped):
    x, y, message = BAD[kind]
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    np.savez(tmp_path / "d.npz", x=x, y=y)
    options = ("x.npy", "--labels", str(tmp_path / "y.npy")) if mapped else ("d.npz",)
    with pytest.raises(DataError, match=message):
        open_set("--dataset", str(tmp_path / options[0]), *options[1:])


def test_test_part_of_another_shape_is_refused(tmp_path):
    np.savez(tmp_path / "d.npz", x_train=np.zeros((2, 3)), y_train=[0, 1], x_test=np.zeros((2, 4)), y_test=[0, 1])
    with pytest.raises(DataError, match="does not fit"):
        open_set("--dataset", str(tmp_path / "d.npz"))


def test_fraction_that_leaves_nothing_is_refused():
    with pytest.raises(DataError, match="leaves none to train on"):
        open_set("--dataset", "synthetic:2", "--test-fraction", "0.9")


def test_synthetic_sample_depends_on_seed_and_number_alone():
    found = open_set("--dataset", "synthetic:1000x20x3")
    x, y = everything(found.train, 20)
    picked, labels = found.train.batch(np.array([5, 799, 0], np.int32))
    np.testing.assert_array_equal(picked, x[[5, 799, 0]])
    np.testing.assert_array_equal(labels, y[[5, 799, 0]])
    other = everything(open_set("--dataset", "synthetic:1000x20x3", "--seed", "9").train, 20)[0]
    assert (x != other).all()


def test_synthetic_noise_has_unit_variance_around_its_class():
    found = open_set("--dataset", "synthetic:5000x16x4", "--test-fraction", "0")
    x, y = everything(found.train, 16, np.float64)
    for label in range(4):
        own = x[y == label]
        assert len(own) > 1000
        np.testing.assert_allclose(own.std(axis=0), 1, atol=0.1)
    assert abs(np.corrcoef(x[y == 0].T) - np.eye(16)).max() < 0.15


def test_a_huge_synthetic_set_takes_no_memory():
    found = open_set("--dataset", f"synthetic:{10**12}")
    assert found.train.count == 8 * 10**11
