"""Accuracies of several seeds."""

from bench import accuracy, async_modes, compressed_training

DENSE = {0: 0.95, 1: 0.96, 2: 0.94, 3: 0.97, 4: 0.93}


def test_a_mean_has_an_interval():
    assert accuracy.cell(DENSE) == "95.00% ±1.96"  # 2.78 x 1.58 / sqrt(5)
    assert accuracy.cell({0: 0.95}) == "95.00%"


def test_differences_are_of_the_same_seeds():
    better = {seed: value + 0.01 for seed, value in DENSE.items()}
    assert accuracy.difference(better, DENSE) == "+1.00 ±0.00"  # what a seed does to both cancels
    assert accuracy.difference({7: 0.5, 1: 0.94}, DENSE) == "-2.00"
    assert accuracy.difference({7: 0.5}, DENSE) == accuracy.difference(DENSE, {}) == ""


def test_at_least_five_seeds_are_trained():
    assert accuracy.SEEDS >= 5
    for program in (async_modes, compressed_training):
        assert program._parser().parse_args([]).seeds == accuracy.SEEDS
