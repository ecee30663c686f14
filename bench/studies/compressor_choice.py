"""Study of compressors: accuracy at equal steps and at equal bytes, with and without error feedback."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from bench import text_tables
from bench.studies.study_definition import (
    Outcomes,
    Study,
    accuracy_cell,
    chosen,
    container,
    interval_cell,
    names_of,
)
from bench.studies.study_runs import TRAIN, StudyRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RANKS, BATCH, RATE, STEPS = 4, 128, 0.05, 512
DENSE, AT_STEPS, AT_BYTES = "dense", "equal steps", "equal bytes"
DENSE_STEPS, MOST_STEPS = 64, 2048
"""At equal bytes: steps without compression, whose bytes every compressor may send, and most steps of a run."""
EXACT, BIASED, UNBIASED = "", "biased", "unbiased"
SPECS = {
    DENSE: EXACT,
    "bf16": BIASED,
    "fp8": BIASED,
    "error:0.001": BIASED,
    "common": BIASED,
    "int8": BIASED,
    "int4": BIASED,
    "sign": BIASED,
    "topk:0.05": BIASED,
    "sampled:0.05": BIASED,
    "oktopk:0.05": BIASED,
    "powersgd:2": BIASED,
    "int8:rounding=stochastic": UNBIASED,
    "int4:rounding=stochastic": UNBIASED,
    "natural": UNBIASED,
    "qsgd": UNBIASED,
    "ternary": UNBIASED,
    "randomk:0.05": UNBIASED,
    "wangni:0.05": UNBIASED,
    "wangni:variance=1.5": UNBIASED,
}
WITH_BOTH = ("int4", "sign", "topk:0.05", "sampled:0.05", "oktopk:0.05", "powersgd:2")
"""Compressors that are run with and without error feedback."""
FEEDBACK, WITHOUT = ", feedback", ", no feedback"


def _variants() -> list[tuple[str, dict[str, str]]]:
    found: list[tuple[str, dict[str, str]]] = []
    for spec in SPECS:
        own = {} if spec == DENSE else {"compression": spec}
        if spec in WITH_BOTH:
            found.append((spec + FEEDBACK, own | {"error_feedback": "on"}))
            found.append((spec + WITHOUT, own | {"error_feedback": "off"}))
        else:
            found.append((spec, own))
    return found


def _run(name: str, group: str, seed: int, steps: int, own: dict[str, str]) -> StudyRun:
    epochs = -(-steps // (TRAIN // BATCH))
    options = {"lr": RATE, "hidden": (128,), "batch": BATCH, "epochs": epochs, "steps": steps, "evaluate_every": epochs}
    return StudyRun(name, group, seed, RANKS, options | own)


def runs(seed: int) -> list[StudyRun]:
    """Return the runs of a seed at equal steps."""
    return [_run(name, AT_STEPS, seed, STEPS, own) for name, own in _variants()]


def follow(seed: int, outcomes: Outcomes) -> list[StudyRun]:
    """Return the runs of a seed at equal bytes, whose steps follow from the bytes of the first seed's runs."""
    sent = {each.run.variant: each.sent_nbytes for each in outcomes if each.run.seed == 0}
    found = []
    for name, own in _variants():
        if sent.get(name) and DENSE in sent:
            steps = min(MOST_STEPS, round(DENSE_STEPS * sent[DENSE] / sent[name]))
            found.append(_run(name, AT_BYTES, seed, steps, own))
    return found


def tables(outcomes: Outcomes) -> list[str]:
    """Return the page's table."""
    head = ("compression", "kind", "kB a step", "accuracy, equal steps, %", "from dense", "steps, equal bytes",
            "accuracy, equal bytes, %")  # fmt: skip
    rows = [head]
    base = {each.run.seed: each.accuracy for each in chosen(outcomes, DENSE, AT_STEPS)}
    for name in names_of(outcomes, "variant"):
        steps, nbytes = chosen(outcomes, name, AT_STEPS), chosen(outcomes, name, AT_BYTES)
        pairs = [100 * (each.accuracy - base[each.run.seed]) for each in steps if each.run.seed in base]
        rows.append(
            (
                name,
                SPECS[name.partition(",")[0]],
                f"{median(each.sent_nbytes for each in steps) / 1e3:.2f}" if steps else "",
                accuracy_cell(steps),
                interval_cell(pairs, "+.2f") if pairs else "",
                f"{nbytes[0].run.options['steps']}" if nbytes else "",
                accuracy_cell(nbytes),
            )
        )
    what = (
        f"Test accuracy after {STEPS} steps, its difference from dense with the same seed, and test accuracy when a "
        f"rank has sent as many bytes as without compression in {DENSE_STEPS} steps, or after {MOST_STEPS} steps."
    )
    return [what, "", *container(text_tables.markdown(rows, names=2))]


def draw(figure: Figure, outcomes: Outcomes) -> None:
    """Draw accuracy against the bytes of a step, at equal steps and at equal bytes."""
    marks = {EXACT: "*", BIASED: "o", UNBIASED: "^"}
    for axes, group in zip(figure.subplots(1, 2, sharey=True), (AT_STEPS, AT_BYTES), strict=True):
        for number, name in enumerate(names_of(outcomes, "variant")):
            found = chosen(outcomes, name, group)
            if not found:
                continue
            values = [100 * each.accuracy for each in found]
            middle, nbytes = median(values), median(each.sent_nbytes for each in found) / 1e3
            errors = [[middle - min(values)], [max(values) - middle]]
            filled = "none" if name.endswith(WITHOUT) else f"C{number % 10}"
            axes.errorbar([nbytes], [middle], yerr=errors, fmt=marks[SPECS[name.partition(",")[0]]], capsize=2,
                          color=f"C{number % 10}", markerfacecolor=filled, label=name)  # fmt: skip
        axes.set(xscale="log", xlabel="kB that a rank sends in a step", title=group)
        axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.axes[0].set(ylabel="test accuracy, %")


STUDY = Study(
    name="compressors",
    title="Choice of a compressor",
    question="Which compressor of gradients keeps the accuracy with the same number of steps, and which gets furthest "
    "with the same number of bytes? What do error feedback and unbiased rounding contribute?",
    setting=f"A perceptron with 128 hidden elements, {BATCH} samples in a step over all ranks, momentum 0.9, learning "
    f"rate {RATE}, which decays to 0 in the steps of each run. With error feedback each rank keeps a momentum of its "
    "own, see {doc}`../guides/compress`; unbiased compressors have none.",
    runs=runs,
    follow=follow,
    tables=tables,
    draw=draw,
    caption="Accuracy against bytes a step, at equal steps and at equal bytes",
    conclusions=(
        "At equal steps `bf16`, `fp8`, `error:0.001`, `int8` and `int4` with feedback equal dense gradients. So do "
        "`sign`, `topk:0.05` and `powersgd:2` with feedback, which send 5 to 16 times fewer bytes. `sampled:0.05` is "
        "`topk:0.05` for vectors as short as these.",
        "`oktopk:0.05` with feedback loses 0.2 points and sends more than `topk:0.05`. Without feedback it sends four "
        "times as much as dense gradients: nearly all of it are histograms for the exact threshold, as long for these "
        "short vectors as for long ones.",
        "Error feedback is needed by compressors that leave much out: without it `sign` loses 6 points, "
        "`topk:0.05` loses 9 and `powersgd:2` loses 18.",
        "Unbiased compressors with a large variance are no substitute for feedback at this learning rate: "
        "`qsgd` loses 3 points, `ternary` and `wangni:0.05` about 10, `randomk:0.05` 24. Those with a small "
        "variance, `natural` and stochastic rounding to 8 or 4 bits, lose at most 0.4, and no less than "
        "rounding to nearest. `wangni:variance=1.5` loses 0.3, but gradients are hardly sparse then: it sends three "
        "quarters of the bytes of dense ones.",
        "At equal bytes `sign` with feedback is the best, 27 points above dense gradients, since it takes 16 "
        "times as many steps.",
    ),
)
