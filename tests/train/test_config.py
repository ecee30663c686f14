import dataclasses

import pytest

from mpicoll.train.config import Synthetic, TrainConfig, parse_synthetic
from mpicoll.train.failures import UsageError
from mpicoll.train.options import HelpRequested, parse


def test_no_options_are_the_defaults():
    assert parse([]) == TrainConfig()


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        parse([]).lr = 1


def test_options_arrive():
    config = parse(
        ["--hidden", "12,3", "--batch=7", "--bucket-bytes=64K", "--timeout=2.5", "--no-progress", "--steps=9"]
    )
    assert (config.hidden, config.batch, config.bucket_bytes, config.timeout) == ((12, 3), 7, 65536, 2.5)
    assert not config.progress
    assert config.steps == 9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--hidden 64 --model logistic", "--hidden is for --model mlp"),
        ("--hidden 64 --model conv", "--hidden is for --model mlp"),
        ("--filters 3", "--filters is for --model conv"),
        ("--hidden 0", "--hidden"),
        ("--hidden 64,", "--hidden"),
        ("--labels y.npy", "--labels is for"),
        ("--dataset x.npy", "needs --labels"),
        ("--dataset synthetic", "synthetic:N"),
        ("--dataset synthetic:", "synthetic:N"),
        ("--dataset synthetic:1", "at least 2 samples"),
        ("--dataset synthetic:10x0", "at least"),
        ("--dataset synthetic:10x4x1", "at least"),
        ("--batch 0", "--batch"),
        ("--batch -1", "--batch"),
        ("--batch 1.5", "--batch"),
        ("--batch ٣x", "--batch"),
        ("--epochs 0", "--epochs"),
        ("--lr -1", "--lr"),
        ("--lr nan", "--lr"),
        ("--lr inf", "--lr"),
        ("--momentum 1", "--momentum"),
        ("--momentum 0 --nesterov", "--nesterov needs"),
        ("--timeout 0", "--timeout"),
        ("--test-fraction 1", "--test-fraction"),
        ("--bucket-bytes 0", "--bucket-bytes"),
        ("--bucket-bytes 4X", "--bucket-bytes"),
        ("--compression int9", "--compression: 'int9' is not one of .*sign"),
        ("--compression int8:block=33", "block: 33"),
        ("--compression int8 --dtype float64", "--dtype float32"),
        ("--error-feedback on", "without --compression"),
        ("--warmup-dense 3", "without --compression"),
        ("--compression int4:rounding=stochastic --error-feedback on", "unbiased"),
        ("--compression sign --error-feedback maybe", "--error-feedback"),
        ("--model tree", "--model"),
        ("--microbatches 2", "--microbatches has no meaning without --pipeline"),
        ("--pipeline-schedule gpipe --tensor 2", "--pipeline-schedule has no meaning without --pipeline"),
        ("--pipeline-schedule zigzag --pipeline 2", "--pipeline-schedule"),
        ("--pipeline 3 --hidden 8", "--pipeline 3 needs as many layers; --hidden makes 2"),
        ("--tensor 2 --model logistic", "--tensor and --pipeline are for --model mlp, not logistic"),
        ("--pipeline 2 --model conv", "--tensor and --pipeline are for --model mlp, not conv"),
        ("--servers 1", "--servers is for --mode ps, not sync"),
        ("--staleness 0", "--staleness is for --mode ps, not sync"),
        ("--mode p2p --damping", "--damping is for --mode ps, not p2p"),
        ("--mode ps --sync-every 3", "--sync-every is for --mode local, not ps"),
        ("--mode ps --backup 1", "--backup needs --staleness 0"),
        ("--mode ps --push direct --compression int8", "--compression needs --push mailbox"),
        ("--mode ps --push direct --staleness 0", "--staleness 0 needs --push mailbox"),
        ("--mode ps --push direct --optimizer adam", "--optimizer needs --push mailbox"),
        ("--mode ps --compression powersgd:4", "--compression powersgd:4"),
        ("--mode ps --shard optimizer", "--shard is for --mode sync, not ps"),
        ("--mode gossip --compression int8", "--compression is not for --mode gossip"),
        ("--mode gossip --overlap on", "--overlap on is for --mode sync"),
        ("--mode local --optimizer adam", "--optimizer adam is for --mode ps or p2p, not local"),
        ("--optimizer sgd", "--optimizer sgd is for --mode ps or p2p, not sync"),
        ("--mode p2p --nesterov", "--nesterov is not for --mode p2p"),
        ("--mode elsewhere", "--mode"),
        ("--slow 1", "--slow"),
        ("--slow 1:0.5", "--slow"),
        ("--slow 1:2,1:3", "--slow"),
        ("--jitter -1", "--jitter"),
        ("--dtype float16", "--dtype"),
        ("--epoch 3", "unrecognized"),
        ("--bogus", "unrecognized"),
        ("stray", "unrecognized"),
        ("--seed", "expected one argument"),
    ],
)
def test_wrong_options_give_one_line(options, message):
    with pytest.raises(UsageError, match=message) as caught:
        parse(options.split())
    assert "\n" not in str(caught.value)
    assert caught.value.exit_status == 2


def test_options_of_modes():
    config = parse(["--mode", "ps", "--staleness", "0", "--slow", "1:2,3:5.5"])
    assert (config.servers, config.staleness, config.slow) == (1, 0, ((1, 2.0), (3, 5.5)))
    assert parse(["--mode", "ps"]).staleness is None
    assert parse([]).servers == 0


def test_help_names_every_option_and_default():
    with pytest.raises(HelpRequested) as caught:
        parse(["--help"])
    text = " ".join(str(caught.value).split())
    for field in dataclasses.fields(TrainConfig):
        name = "no-progress" if field.name == "progress" else field.name.replace("_", "-")
        assert f"--{name}" in text
    for default in ("0.2", "256,128", "digits", "cosine", "float32", "60.0"):
        assert f"default: {default}" in text
    assert "examples" in text


def test_compression_arrives():
    config = parse(["--compression", "sign:block=64", "--error-feedback", "off", "--warmup-dense", "5"])
    assert (config.compression, config.error_feedback, config.warmup_dense) == ("sign:block=64", "off", 5)


def test_a_pipeline_has_micro_batches_and_a_schedule_by_default():
    alone, shared = parse([]), parse(["--pipeline", "2"])
    assert (alone.microbatches, shared.microbatches, shared.pipeline_schedule) == (1, 4, "1f1b")
    assert parse(["--pipeline", "2", "--pipeline-schedule", "gpipe"]).pipeline_schedule == "gpipe"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("synthetic:5", Synthetic(5)), ("synthetic:5x6", Synthetic(5, 6)), ("synthetic:5x6x7", Synthetic(5, 6, 7))],
)
def test_synthetic_is_read(text, expected):
    assert parse_synthetic(text) == expected
