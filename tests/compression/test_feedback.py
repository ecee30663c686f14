"""Error feedback without ranks: what is owed, to the bit, and what a checkpoint holds."""

from __future__ import annotations

import numpy as np
import pytest

from mpicoll.compression import ErrorFeedback, Key, compressor, names

COUNT = 3000
BIASED = [name for name in names() if not compressor(name).unbiased]
EXACT = [name for name in names() if name.startswith(("fp16", "bf16", "int", "topk"))]


def vector(step: int, count: int = COUNT) -> np.ndarray:
    return np.random.default_rng(step).standard_normal(count).astype(np.float32)


def send(feedback: ErrorFeedback, x: np.ndarray, step: int = 0) -> np.ndarray:
    """Compress what is owed and return what arrives."""
    codec, owed = feedback.compressor, feedback.begin(x)
    payload = np.empty(codec.wire_nbytes(x.size), np.uint8)
    nbytes = codec.compress(owed, payload, Key(0, 0, step))
    sent = np.empty_like(x)
    codec.decompress(payload[:nbytes], sent)
    feedback.update(sent)
    feedback.end()
    return sent


def bits(x: np.ndarray) -> np.ndarray:
    return x.view(np.uint32)


@pytest.mark.parametrize("spec", BIASED)
def test_what_is_owed_is_what_did_not_arrive(spec: str) -> None:
    feedback, before = ErrorFeedback(spec), np.zeros(COUNT, np.float32)
    for step in range(5):
        x = vector(step)
        sent = send(feedback, x, step)
        np.testing.assert_array_equal(bits(feedback.residual), bits((before + x) - sent))
        if spec in EXACT:
            np.testing.assert_array_equal(sent + feedback.residual, before + x)
        before = feedback.residual.copy()
    assert feedback.steps == 5
    assert np.abs(before).max() > 0


@pytest.mark.parametrize("spec", ["randomk:0.1", "wangni", "ternary", "qsgd", "natural", "int4:rounding=stochastic"])
def test_unbiased_compressors_are_refused(spec: str) -> None:
    with pytest.raises(ValueError, match=rf"spec: '{spec}' is unbiased"):
        ErrorFeedback(spec)
    with pytest.raises(ValueError, match="is unbiased"):
        ErrorFeedback(compressor(spec))


def test_a_small_constant_arrives_in_the_end() -> None:
    x = np.full(64, 0.001, np.float32)
    x[0] = 1
    lost, kept = np.zeros(64, np.float32), np.zeros(64, np.float32)
    feedback = ErrorFeedback("int4")
    for step in range(200):
        kept += send(feedback, x, step)
        lost += send(ErrorFeedback("int4"), x, step)
    assert (lost[1:] == 0).all()
    np.testing.assert_allclose(kept[1:], 0.2, atol=0.08)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("spec", BIASED)
def test_what_is_not_finite_comes_once(spec: str, value: float) -> None:
    feedback = ErrorFeedback(spec)
    send(feedback, vector(0))
    x = vector(1)
    x[5] = value
    arrived = send(feedback, x)[5]
    assert not np.isfinite(arrived)
    assert np.isfinite(feedback.residual).all()
    assert feedback.residual[5] == 0
    assert np.isfinite(send(feedback, vector(2))).all()


def test_what_is_not_finite_and_was_not_sent_is_forgotten() -> None:
    feedback, x = ErrorFeedback("topk"), vector(0)
    feedback.compensate(np.where(np.arange(COUNT) % 3 == 0, np.float32(np.nan), x))
    state = feedback.state()
    assert (state["residual"][::3] == 0).all()
    ErrorFeedback("topk").load(state)
    np.testing.assert_array_equal(feedback.compensate(x), np.where(np.arange(COUNT) % 3 == 0, x, x + x))


def test_too_large_for_float16_is_not_owed_for_ever() -> None:
    feedback = ErrorFeedback("fp16")
    assert np.isinf(send(feedback, np.full(8, 1e6, np.float32))).all()
    assert (feedback.residual == 0).all()


def test_parts_share_the_memory_of_the_whole() -> None:
    whole, x = ErrorFeedback("int4:block=32"), vector(3, 128)
    parts = [whole.part(0, 64, 128), whole.part(64, 128, 128)]
    assert whole.part(0, 64, 128) is parts[0]
    inner = parts[1].part(32, 64, 64)
    for part, piece in ((parts[0], x[:64]), (parts[1].part(0, 32, 64), x[64:96]), (inner, x[96:])):
        send(part, piece)
    alone = ErrorFeedback("int4:block=32")
    send(alone, x)
    np.testing.assert_array_equal(whole.residual, alone.residual)
    assert inner.steps == 1
    whole.load(alone.state())
    send(parts[0], x[:64])
    assert (whole.residual[:64] != alone.residual[:64]).any()
    np.testing.assert_array_equal(whole.residual[64:], alone.residual[64:])


def test_state_goes_through_a_checkpoint() -> None:
    first, second = ErrorFeedback("sign"), ErrorFeedback("sign")
    assert first.state() == {}
    send(first, vector(0))
    first.open_result()[20:30] += vector(7, 10)
    state = first.state()
    second.load(state)
    state["residual"][:] = 7
    np.testing.assert_array_equal(send(first, vector(1)), send(second, vector(1)))
    assert second.steps == 2
    np.testing.assert_array_equal(first.result_residual, second.result_residual)
    second.load({})
    assert second.residual is None
    assert second.steps == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"residual": np.zeros(7, np.float32)}, r"shape \(7,\)"),
        ({"residual": np.zeros(COUNT)}, "float64"),
        ({"residual": np.full(COUNT, np.nan, np.float32)}, "not finite"),
        ({"result_residual": np.zeros(5, np.float32)}, "result_residual"),
        ({"steps": np.array(-1)}, "steps"),
        ({"steps": np.array(0.5)}, "steps"),
        ({"other": np.zeros(1)}, "other"),
    ],
)
def test_a_wrong_state_is_refused_and_changes_nothing(change: dict[str, np.ndarray], says: str) -> None:
    feedback = ErrorFeedback("sign")
    send(feedback, vector(0))
    before = feedback.state()
    with pytest.raises(ValueError, match=says):
        feedback.load({**before, **change})
    np.testing.assert_array_equal(feedback.residual, before["residual"])
    with pytest.raises(ValueError, match="are not residual"):
        feedback.load({"steps": before["steps"]})


def test_another_count_and_another_call_are_refused() -> None:
    feedback = ErrorFeedback("sign")
    send(feedback, vector(0))
    owed = feedback.residual.copy()
    with pytest.raises(ValueError, match="3000 elements, not 5"):
        feedback.check(5)
    with pytest.raises(ValueError, match="this object is for 3000 elements, not "):
        feedback.compensate(vector(0, 5))
    np.testing.assert_array_equal(feedback.residual, owed)
    feedback.part(0, 10, COUNT).begin(vector(0, 10))
    with pytest.raises(ValueError, match="in use"):
        feedback.check(COUNT)
    feedback.reset()
    feedback.check(5)
    assert feedback.residual is None


def test_it_says_what_it_is() -> None:
    assert repr(ErrorFeedback("sign:block=64")) == f"ErrorFeedback({compressor('sign:block=64')!r})"
