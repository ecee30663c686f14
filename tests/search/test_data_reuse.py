"""Trials read a data set again whenever an option on which it depends has changed."""

from __future__ import annotations

import argparse
from dataclasses import fields

from mpicoll.search.trainer_objective import OF_DATA
from mpicoll.train.config import TrainConfig
from mpicoll.train.model_options import add_data


def test_all_options_of_the_data_count() -> None:
    parser = argparse.ArgumentParser()
    add_data(parser)
    names = {action.dest for action in parser._actions} - {"help", "prefetch"}
    assert names <= set(OF_DATA)
    assert set(OF_DATA) <= {field.name for field in fields(TrainConfig)}
