"""Options of data set, model and task."""

from __future__ import annotations

import argparse

from mpicoll.train.config import BATCH_NORMS, DTYPES, MODELS, PRECISIONS, TASKS
from mpicoll.train.model_checks import CONTEXT, DROPOUT, FILTERS, HEADS, HIDDEN, LAYERS, WIDTH
from mpicoll.train.option_types import integer, model, names, power_of_two, real, widths

DATASETS = """\
data sets (files are read as data only, never unpickled):
  digits               8 x 8 images of digits, from scikit-learn
  DIRECTORY            the four IDX files of MNIST and its relatives, gzipped or not
  FILE.npz             arrays x_train, y_train, x_test, y_test; or x and y, which are split
  FILE.npy             samples by row, mapped into memory; needs --labels
  FILE-idx3-ubyte      samples of an IDX file, gzipped or not; needs --labels
  FILE.csv             a sample in each line, with or without names of columns in the first
  FILE.parquet         a sample in each row; needs pyarrow
  PATTERN              several such files, or .npz with x and y, in the order of their names: 'part-*.parquet'
  synthetic:N[xF][xC]  N samples, F features (64), C classes or targets (10), computed when they are used
  text:FILE            bytes of a file, or of all files *.txt of a directory, mapped into memory
  synthetic_text[:N]   N bytes (100000) of sentences made from a few words
  Unsigned bytes are divided by 255; other numbers are not changed. The bytes of a text are not changed either."""


def add_data(parser: argparse.ArgumentParser) -> None:
    """Add the options of the data set."""
    group = parser.add_argument_group("data")
    group.add_argument("--dataset", default=None, metavar="NAME", help="data set, see below (default: digits; "
                       "synthetic_text for --model transformer)")  # fmt: skip
    group.add_argument("--labels", metavar="FILE", help="the labels of a --dataset FILE.npy or an IDX file, integers "
                       "from 0; or targets, numbers; or a pattern of as many files")  # fmt: skip
    group.add_argument("--target", type=names, metavar="NAME[,NAME...]", help="columns of a .csv or .parquet file that "
                       "are labels or targets; all others are features (default: the last)")  # fmt: skip
    group.add_argument(
        "--test-fraction", type=real(0, 1), metavar="X", help="fraction that is held out for testing, chosen by "
        "--seed, if the data set has no test part of its own; the end of a text (default: %(default)s)"
    )  # fmt: skip
    group.add_argument("--share-data", action="store_true", help="hold a data set that is read into memory once on "
                       "each node, in memory that its ranks share, in place of once for each rank")  # fmt: skip
    group.add_argument("--prefetch", type=integer(0), metavar="N", help="number of batches that a thread makes ahead "
                       "of the steps that use them; results are the same (default: %(default)s)")  # fmt: skip


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the options of model and task."""
    group = parser.add_argument_group("model")
    group.add_argument("--model", type=model, metavar="NAME", help=f"{', '.join(MODELS)}: multilayer perceptron, "
                       "logistic (or linear) regression, one 3 x 3 convolution with a dense layer, AlexNet-like "
                       "network for images, decoder-only transformer for texts; or package.module:factory, a function "
                       "that returns a model of your own (default: %(default)s)")  # fmt: skip
    group.add_argument("--task", choices=TASKS, default=None, help="classification; regression, with the mean of "
                       "squared differences as loss; language_modeling, prediction of the next byte of a text, with "
                       "the loss in nats per byte (default: classification; language_modeling for texts)")  # fmt: skip
    group.add_argument("--hidden", type=widths, default=None, metavar="N[,N...]",
                       help=f"widths of the hidden layers of mlp (default: {','.join(map(str, HIDDEN))})")  # fmt: skip
    group.add_argument("--filters", type=integer(1), default=None, metavar="N",
                       help="filters of conv, or of the first convolution of alexnet, whose other widths are "
                       f"proportional: AlexNet has 64 (default: {FILTERS})")  # fmt: skip
    group.add_argument("--layers", type=integer(1), default=None, metavar="N",
                       help=f"blocks of transformer (default: {LAYERS})")  # fmt: skip
    group.add_argument("--heads", type=integer(1), default=None, metavar="N",
                       help=f"attention heads of each block (default: {HEADS})")  # fmt: skip
    group.add_argument("--width", type=integer(1), default=None, metavar="N", help="elements of each position of "
                       f"transformer, a multiple of --heads (default: {WIDTH})")  # fmt: skip
    group.add_argument("--context", type=integer(1), default=None, metavar="N",
                       help=f"bytes of a sample of a text (default: {CONTEXT})")  # fmt: skip
    group.add_argument("--dropout", type=real(0, 1), default=None, metavar="X", help="probability of dropout (default: "
                       f"{DROPOUT['alexnet']} for alexnet, {DROPOUT['transformer']} for transformer)")  # fmt: skip
    group.add_argument("--batch-norm", choices=BATCH_NORMS, help="batch normalisation before the ReLU of hidden layers "
                       "of mlp and of convolutions of alexnet: with statistics of the samples of all ranks, or of each "
                       "rank's own (default: %(default)s)")  # fmt: skip
    group.add_argument("--dtype", choices=DTYPES, help="type in which layers compute and parameters are updated "
                       "(default: %(default)s)")  # fmt: skip
    group.add_argument("--precision", choices=PRECISIONS, help="type of the parameters that layers use and of the "
                       "gradients and parameters that ranks send: full, that of --dtype; or 16 bits, with a float32 "
                       "copy that is updated (default: %(default)s)")  # fmt: skip
    group.add_argument("--loss-scale", type=power_of_two, default=None, metavar="X", help="float16: first factor by "
                       "which gradients are multiplied, a power of two; halved when they overflow (default: "
                       "65536)")  # fmt: skip
    group.add_argument("--loss-scale-interval", type=integer(1), default=None, metavar="STEPS",
                       help="float16: steps without overflow after which it doubles (default: 2000)")  # fmt: skip
