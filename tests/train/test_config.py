import dataclasses

import pytest

from mpicoll.errors import UsageError
from mpicoll.train.config import Synthetic, TrainConfig, parse_synthetic
from mpicoll.train.options import HelpRequested, parse, without
from mpicoll.train.step_plan import StepPlan
from mpicoll.train.strategies import STRATEGIES, strategy_name


def test_no_options_are_the_defaults():
    assert parse([]) == TrainConfig()


@pytest.mark.parametrize(
    ("words", "names", "left"),
    [
        ("--lr 0.3 --clip=3 --nesterov --batch 7", ["clip", "nesterov"], "--lr 0.3 --batch 7"),
        ("--batch-norm local --batch 7", ["batch"], "--batch-norm local"),
        ("--checkpoint a --resume --lr 1", ["resume"], "--checkpoint a --lr 1"),
        ("--resume fallback --lr 1 --resume", ["resume"], "--lr 1"),
        ("--lr 1 --lr=2 --quiet --lr 3", ["lr"], "--quiet"),
        ("--no-progress --quiet", ["progress"], "--quiet"),
        ("--compression nesterov", ["nesterov"], "--compression nesterov"),
        ("--compression", ["compression"], ""),
        ("--unknown lr", ["lr"], "--unknown lr"),
    ],
)
def test_options_are_taken_out_with_their_values(words, names, left):
    assert without(words.split(), names) == left.split()


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
        ("--filters 3", "--filters is for --model conv or alexnet, not mlp"),
        ("--hidden 0", "--hidden"),
        ("--hidden 64,", "--hidden"),
        ("--labels y.npy", "--labels is for"),
        ("--dataset x.npy", "needs --labels"),
        ("--dataset synthetic", "synthetic:N"),
        ("--dataset synthetic:", "synthetic:N"),
        ("--dataset synthetic:1", "at least 2 samples"),
        ("--dataset synthetic:10x0", "at least"),
        ("--dataset synthetic:10x4x0", "at least"),
        ("--dataset synthetic:10x4x1", "has 1 class; 2 at least, or --task regression"),
        ("--prefetch -1", "--prefetch"),
        ("--prefetch 2 --balance auto", "--prefetch is not for --balance auto"),
        ("--prefetch 2 --mode gossip", "--prefetch is for ranks that take steps together"),
        ("--share-data --dataset synthetic:10", "--share-data has no meaning for --dataset synthetic:10"),
        ("--share-data --model transformer", "--share-data has no meaning for --dataset synthetic_text"),
        ("--pipeline 2 --slow 1:3", "--slow is not for --pipeline"),
        ("--pipeline 2 --jitter 0.1", "--jitter is not for --pipeline"),
        ("--offload x", "--offload is for sharded strategies, not --strategy replicated"),
        ("--offload x --mode ps", "--offload is for sharded strategies, not --strategy parameter_server"),
        ("--batch 0", "--batch"),
        ("--seed 99999999999999999999", "--seed: '99999999999999999999' is too large, with more than 18 digits"),
        ("--compression auto:int8", "--compression auto:int8: auto compresses where measured times say so"),
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
        ("--compression int8:block=33", "--compression: .int8:block=33.: block: 33"),
        ("--mode ps --pull-compression topk:2", "--pull-compression: .topk:2.: density: 2.0"),
        ("--compression int8 --dtype float64", "--dtype float32"),
        ("--error-feedback on", "without --compression"),
        ("--warmup-dense 3", "without --compression"),
        ("--compression int4:rounding=stochastic --error-feedback on", "unbiased"),
        ("--compression sign --error-feedback maybe", "--error-feedback"),
        ("--model tree", "--model"),
        ("--microbatches 2", "--microbatches has no meaning without --pipeline"),
        ("--pipeline-schedule gpipe --tensor 2", "--pipeline-schedule has no meaning without --pipeline"),
        ("--pipeline-schedule zigzag --pipeline 2", "--pipeline-schedule"),
        ("--pipeline 3 --hidden 8", "--pipeline 3 needs a layer for each stage; --hidden gives 2"),
        ("--tensor 2 --model logistic", "--tensor is for --model mlp, alexnet or transformer, not logistic"),
        ("--tensor 2 --model conv", "--tensor is for --model mlp, alexnet or transformer, not conv"),
        ("--tensor 3 --model transformer --heads 2", "--tensor 3 needs a head for each rank; --heads is 2"),
        ("--model transformer --heads 3", "--heads 3 does not divide --width 64"),
        ("--model transformer --dataset digits", "--model transformer is for texts, not for --dataset digits"),
        ("--model transformer --task classification", "--task classification is not for --dataset synthetic_text"),
        ("--dataset text:book", "--dataset text:book is for --model transformer or a model of your own, not mlp"),
        ("--task language_modeling", "--task language_modeling is not for --dataset digits"),
        ("--context 8", "--context is for texts"),
        ("--layers 3", "--layers is for --model transformer, not mlp"),
        ("--dropout 0.1", "--dropout is for --model alexnet or transformer, not mlp"),
        ("--model alexnet --dropout 1", "--dropout"),
        ("--dataset synthetic_text:1 --model transformer", "synthetic_text"),
        ("--dataset synthetic_text:x --model transformer", "synthetic_text"),
        ("--model a.b:", "package.module:factory"),
        ("--model os;system:x", "package.module:factory"),
        ("--servers 1", "--servers is for --strategy parameter_server, not replicated"),
        ("--staleness 0", "--staleness is for --strategy parameter_server, not replicated"),
        ("--mode p2p --damping", "--damping is for --strategy parameter_server, not peer_to_peer"),
        ("--mode ps --sync-every 3", "--sync-every is for --strategy local, not parameter_server"),
        ("--mode ps --backup 1", "--backup needs --staleness 0"),
        ("--mode ps --push direct --compression int8", "--compression needs --push mailbox"),
        ("--mode ps --push direct --pull-compression int8", "--pull-compression needs --push mailbox"),
        ("--mode gossip --pull-compression int8", "--pull-compression is for --strategy parameter_server, not gossip"),
        ("--pull-compression int8", "--pull-compression is for --strategy parameter_server, not replicated"),
        ("--mode ps --pull-compression qsgd", "--pull-compression qsgd is unbiased"),
        ("--mode ps --pull-compression powersgd:4", "--pull-compression powersgd:4 is for sums of all ranks"),
        ("--mode ps --pull-compression magic", "--pull-compression: 'magic' is not one of"),
        ("--mode ps --pull-compression int8 --dtype float64", "--pull-compression is for --dtype float32"),
        ("--mode ps --push direct --staleness 0", "--staleness 0 needs --push mailbox"),
        ("--mode ps --push direct --optimizer adam", "--optimizer adam needs --push mailbox"),
        ("--mode ps --compression powersgd:4", "--compression powersgd:4"),
        (
            "--mode ps --shard optimizer",
            "--shard is for ranks that take steps together, not --strategy parameter_server",
        ),
        ("--mode gossip --compression int8", "--compression is not for --strategy gossip"),
        ("--mode gossip --overlap on", "--overlap on is for ranks that take steps together, not --strategy gossip"),
        ("--mode gossip --optimizer adam", "--optimizer adam is not for --strategy gossip"),
        ("--mode ps --optimizer adamw", "--optimizer adamw is not for --strategy parameter_server"),
        ("--mode p2p --optimizer lamb", "--optimizer lamb is not for --strategy peer_to_peer"),
        ("--beta1 0.8", "--beta1 is for --optimizer adam, adamw or lamb, not momentum"),
        ("--optimizer adagrad --beta2 0.8", "--beta2 is for --optimizer adam, adamw or lamb, not adagrad"),
        ("--optimizer lamb --trust 0.1", "--trust is for --optimizer lars, not lamb"),
        ("--optimizer lars --trust 0", "--trust"),
        *(
            (f"--optimizer {name} --momentum 0.5", f"--momentum is for --optimizer momentum or lars, not {name}")
            for name in ("sgd", "adagrad", "adam", "adamw", "lamb")
        ),
        ("--model transformer --momentum 0.9", "--momentum is for --optimizer momentum or lars, not adamw"),
        *(
            (f"--strategy {name} --bucket-bytes 4M", f"--bucket-bytes is for ranks .* together, not --strategy {name}")
            for name in ("parameter_server", "peer_to_peer", "gossip")
        ),
        *(
            (f"--strategy {name} --overlap off", f"--overlap off is for ranks .* together, not --strategy {name}")
            for name in ("local", "parameter_server", "peer_to_peer", "gossip")
        ),
        *(
            (f"--strategy {name} --algorithm ring", f"--algorithm ring is for ranks .* together, not --strategy {name}")
            for name in ("parameter_server", "peer_to_peer", "gossip")
        ),
        (
            "--strategy local --algorithm noop",
            "--algorithm noop is for ranks that take steps together, not --strategy local",
        ),
        ("--mode ps --staleness 0 --damping", "--damping has no meaning with --staleness 0"),
        ("--optimizer lamb --tensor 2", "--optimizer lamb is not for --tensor, where ranks hold parts of arrays"),
        ("--base-batch 32", "--base-batch has no meaning without --scale-lr"),
        ("--scale-lr cubic", "--scale-lr"),
        ("--scale-lr sqrt --base-batch 0", "--base-batch"),
        ("--optimizer adam --epsilon 0", "--epsilon"),
        ("--optimizer adam --nesterov", "--nesterov needs --optimizer momentum"),
        ("--mode p2p --nesterov", "--nesterov is not for --strategy peer_to_peer"),
        ("--mode elsewhere", "--mode"),
        ("--strategy elsewhere", "--strategy"),
        ("--strategy gossip --mode ps", "--mode is an older name of --strategy"),
        ("--strategy sharded --shard none", "--shard is an older name of --strategy"),
        (
            "--strategy sharded --compression sign",
            "--compression sign is not for --strategy sharded: it needs error feedback",
        ),
        ("--strategy sharded --compression randomk:0.1", "it does not encode each rank's chunk by itself"),
        (
            "--strategy sharded --compression int8 --error-feedback on",
            "--error-feedback on is not for --strategy sharded",
        ),
        ("--on-failure stop", "--on-failure"),
        ("--spares 1", "--spares 1 has no meaning without --on-failure shrink"),
        ("--spares -1", "--spares"),
        (
            "--on-failure shrink --spares 1 --strategy sharded",
            "is for --strategy replicated or parameter_server, not",
        ),
        (
            "--on-failure shrink --strategy sharded",
            "parameter_server, not sharded: a dead rank's part",
        ),
        ("--on-failure shrink --strategy gossip", "for --strategy replicated or parameter_server, not gossip"),
        (
            "--on-failure shrink --mode ps --optimizer sgd --push direct",
            "--on-failure shrink is not for --push direct",
        ),
        ("--on-failure shrink --mode ps --on-silence drop", "--on-failure shrink is not for --on-silence drop"),
        ("--on-failure shrink --mode ps --spares 1", "is not for --spares 1 with --strategy parameter_server"),
        ("--replicas 2", "--replicas is for --strategy parameter_server, not replicated"),
        ("--mode ps --replicas 2", "--replicas 2 needs as many servers, and --servers is 1"),
        ("--mode ps --replicas 2 --servers 2", "--replicas 2 has no meaning without --on-failure shrink"),
        ("--on-failure shrink --compression int8", "--on-failure shrink is not for --compression int8"),
        ("--on-failure shrink --batch-norm local", "--on-failure shrink is not for --batch-norm local"),
        ("--on-failure shrink --tensor 2", "--on-failure shrink is not for --tensor"),
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


@pytest.mark.parametrize(("name", "older"), STRATEGIES.items())
def test_strategies_have_older_names(name, older):
    mode, shard = older
    assert parse(["--strategy", name]) == parse(["--mode", mode, "--shard", shard])
    assert strategy_name(mode, shard) == name


def test_options_of_modes():
    config = parse(["--mode", "ps", "--staleness", "0", "--slow", "1:2,3:5.5"])
    assert (config.servers, config.staleness, config.slow) == (1, 0, ((1, 2.0), (3, 5.5)))
    assert parse(["--mode", "ps"]).staleness is None
    direct = parse(["--strategy", "parameter_server", "--push", "direct"])
    assert (direct.push, direct.optimizer) == ("direct", "momentum")
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


@pytest.mark.parametrize(
    ("options", "lr"), [("", 0.1), ("--optimizer adam", 0.001), ("--optimizer adam --lr 0.1", 0.1)]
)
def test_the_learning_rate_depends_on_the_optimizer_unless_it_is_given(options, lr):
    assert parse(options.split()).lr == lr


@pytest.mark.parametrize(
    ("options", "peak"),
    [
        ("", 0.1),
        ("--scale-lr linear", 0.1),
        ("--scale-lr linear --batch 128", 0.2),
        ("--scale-lr sqrt --batch 256", 0.2),
        ("--scale-lr linear --batch 32 --accumulate 4 --base-batch 16", 0.8),
        ("--scale-lr sqrt --batch 32 --base-batch 128 --lr 3", 1.5),
    ],
)
def test_the_rate_is_scaled_to_the_samples_of_a_step(options, peak):
    config = parse([*options.split(), "--warmup", "0"])
    plan = StepPlan(config, 10_000)
    assert plan.peak == pytest.approx(peak)
    assert plan.rate(0) == plan.peak


def test_options_that_not_all_strategies_have_arrive():
    assert parse(["--strategy", "local", "--bucket-bytes", "64K"]).bucket_bytes == 65536
    assert parse(["--strategy", "local", "--algorithm", "ring"]).algorithm == "ring"
    assert parse(["--strategy", "gossip", "--algorithm", "auto"]).algorithm == "auto"
    assert parse(["--strategy", "gossip", "--overlap", "auto", "--momentum", "0.5"]).momentum == 0.5
    assert parse(["--strategy", "parameter_server", "--staleness", "1", "--damping"]).damping
    for words in (["--optimizer", "sgd"], ["--strategy", "gossip"]):
        config = parse(words)
        assert (config.momentum, config.bucket_bytes) == (TrainConfig.momentum, TrainConfig.bucket_bytes)


def test_settings_of_an_optimizer_reach_it():
    assert parse(["--optimizer", "lars", "--momentum", "0.8", "--trust", "0.02"]).optimizer_settings == {
        "momentum": 0.8,
        "trust": 0.02,
    }
    config = parse(["--optimizer", "adamw", "--beta1", "0.8", "--epsilon", "1e-6"])
    assert config.optimizer_settings == {"beta1": 0.8, "epsilon": 1e-6}
