"""What every registered compressor has to do, whatever it is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from mpicoll.compression import Compressor, Key, Sparsifier, compressor, names
from mpicoll.compression.aggregatable import AggregatableCompressor
from mpicoll.compression.powersgd import PowerSGD
from mpicoll.compression.randomized import RandomK
from mpicoll.errors import CorruptPayload, UnknownCompressor

EXTRA = [
    "int8:block=32",
    "int4:rounding=stochastic",
    "int5:64",
    "int2:rounding=stochastic:block=96",
    "sign:block=32",
    "sign:block=96",
    "fp8:rounding=stochastic",
    "e5m2:32:rounding=stochastic",
    "qsgd:127:bucket=32",
    "ternary:20",
    "ternary:clip=2.5",
    "natural:32",
    "error:1e-6:block=32",
    "topk:k=70",
    "topk:1",
    "sampled:0.05",
    "randomk:0.2",
    "randomk:scale=0",
    "wangni:0.3",
    "wangni:variance=1.5",
    "wangni:variance=20",
    "common:16",
    "common:block=0",
    "common:block=33:rounding=stochastic",
    "powersgd:1",
    "powersgd:8:rows=10",
]
SPECS = [*names(), *EXTRA]
COUNTS = (1, 2, 31, 32, 33, 511, 512, 513, 5000)

VECTORS: dict[str, Callable[[int], np.ndarray]] = {
    "normal": lambda n: np.random.default_rng(n).standard_normal(n),
    "zero": np.zeros,
    "minus zero": lambda n: np.full(n, -0.0),
    "constant": lambda n: np.full(n, -3.25),
    "huge beside tiny": lambda n: np.where(np.arange(n) % 7 == 3, 3e38, 1e-38),
    "largest": lambda n: np.full(n, np.finfo(np.float32).max),
    "subnormal": lambda n: np.full(n, 1e-41),
    "small": lambda n: np.full(n, 1e-36),
}


@pytest.fixture(params=SPECS)
def codec(request: pytest.FixtureRequest) -> Compressor:
    return compressor(request.param)


def encode(codec: Compressor, x: np.ndarray, key: Key = Key(1, 2, 3)) -> np.ndarray:  # noqa: B008
    guard = np.full(codec.wire_nbytes(x.size) + 64, 0xA5, np.uint8)
    nbytes = codec.compress(x, guard[: codec.wire_nbytes(x.size)], key)
    assert nbytes <= codec.wire_nbytes(x.size)
    assert (guard[codec.wire_nbytes(x.size) :] == 0xA5).all()
    return guard[:nbytes]


def decode(codec: Compressor, payload: np.ndarray, count: int) -> np.ndarray:
    out = np.full(count, np.nan, np.float32)
    codec.decompress(payload, out)
    return out


@pytest.mark.parametrize("name", VECTORS)
def test_every_length_and_content(codec: Compressor, name: str) -> None:
    for count in COUNTS:
        x = VECTORS[name](count).astype(np.float32)
        kept = x.copy()
        payload = encode(codec, x)
        assert (x.view(np.uint32) == kept.view(np.uint32)).all(), "the input was changed"
        assert payload.size == codec.wire_nbytes(count) or not codec.fixed
        assert codec.wire_nbytes(count) % 4 == 0
        y = decode(codec, payload, count)
        amplified = isinstance(codec, Sparsifier) and codec.unbiased  # beyond the range of float32 is inf
        amplified |= isinstance(codec, PowerSGD)  # which sums up rows
        if name != "largest" and "float16" not in repr(codec) and not (amplified and name.startswith("huge")):
            assert np.isfinite(y).all()
        if name in ("zero", "minus zero"):
            assert (y == 0).all()
        added = np.full(count, 0.5, np.float32)
        codec.decompress_add(payload, added)
        np.testing.assert_array_equal(added, np.float32(0.5) + y)


def test_the_same_key_gives_the_same_bytes(codec: Compressor) -> None:
    x = np.random.default_rng(1).standard_normal(3000).astype(np.float32)
    assert (encode(codec, x) == encode(codec, x)).all()
    if codec.unbiased:
        others = [Key(2, 2, 3), Key(1, 2, 4), Key(1, 2, 3, first=codec.granularity)]
        others += [] if isinstance(codec, RandomK) else [Key(1, 3, 3)]  # all ranks are to draw the same positions
        assert not any(np.array_equal(encode(codec, x, key), encode(codec, x)) for key in others)


def test_vectors_with_gaps_are_read_and_written_as_others(codec: Compressor) -> None:
    every = np.random.default_rng(5).standard_normal(2000).astype(np.float32)
    x = every[::2]
    payload = encode(codec, x)
    np.testing.assert_array_equal(payload, encode(codec, x.copy()))
    whole, wanted = np.full(2000, 0.5, np.float32), decode(codec, payload, x.size)
    codec.decompress(payload, whole[::2])
    np.testing.assert_array_equal(whole[::2], wanted)
    codec.decompress_add(payload, whole[1::2])
    np.testing.assert_array_equal(whole[1::2], np.float32(0.5) + wanted)


def test_wrong_arrays_are_refused(codec: Compressor) -> None:
    x, out = np.ones(64, np.float32), np.empty(codec.wire_nbytes(64), np.uint8)
    nbytes = codec.compress(x, out, Key())
    for other in (x.astype(np.float64), np.arange(64), x.astype(np.float16), x.tolist()):
        with pytest.raises(TypeError, match=r"x: .* is not float32"):
            codec.compress(other, out, Key())
    with pytest.raises(ValueError, match="x: an array of shape"):
        codec.compress(x.reshape(8, 8), out, Key())
    with pytest.raises(ValueError, match=f"out: {out.size - 4} bytes are less than"):
        codec.compress(x, out[:-4], Key())
    with pytest.raises(TypeError, match="out: float64 is not float32"):
        codec.decompress(out[:nbytes], np.empty(64))
    x.flags.writeable = False
    with pytest.raises(ValueError, match="out: it is read-only"):
        codec.decompress(out[:nbytes], x)


def test_cutting_at_the_granularity_changes_nothing(codec: Compressor) -> None:
    if not codec.cuttable:
        pytest.skip("what arrives depends on the whole vector")
    x = np.random.default_rng(1).standard_normal(4000).astype(np.float32)
    cut = 3 * codec.granularity if codec.granularity > 1 else 1234
    whole = decode(codec, encode(codec, x), x.size)
    parts = [(0, cut), (cut, x.size)]
    pieces = [decode(codec, encode(codec, x[a:b], Key(1, 2, 3, first=a)), b - a) for a, b in parts]
    np.testing.assert_array_equal(whole, np.concatenate(pieces))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so(codec: Compressor, value: float) -> None:
    x = np.ones(700, np.float32)
    x[600] = value
    y = decode(codec, encode(codec, x), x.size)
    if isinstance(codec, RandomK):
        drawn = codec.positions(x.size, Key(1, 2, 3))
        assert np.isfinite(y[600]) == (600 not in drawn)
    else:
        assert not np.isfinite(y[600])
    spreads = isinstance(codec, AggregatableCompressor) and not codec.cuttable
    assert spreads or np.isfinite(y[: 600 // max(codec.granularity, 1) * max(codec.granularity, 1)]).all()


def test_wrong_lengths_are_refused(codec: Compressor) -> None:
    x = np.ones(1000, np.float32)
    payload = encode(codec, x)
    for wrong in (payload[:-4], payload[:0], np.concatenate([payload, payload[:4]])):
        with pytest.raises(CorruptPayload, match=f"{wrong.size} bytes for 1000 elements"):
            decode(codec, wrong.copy(), 1000)


def test_damaged_bytes_are_refused_or_harmless(codec: Compressor) -> None:
    random = np.random.default_rng(5)
    x = random.standard_normal(600).astype(np.float32)
    payload = encode(codec, x)
    for _ in range(300):
        damaged = payload.copy()
        damaged[random.integers(damaged.size)] ^= 1 << random.integers(8)
        guard = np.zeros(600 + 64, np.float32)
        try:
            codec.decompress(damaged, guard[:600])
        except CorruptPayload:
            continue
        assert (guard[600:] == 0).all()


def test_unbiased_means_unbiased(codec: Compressor) -> None:
    if not codec.unbiased:
        pytest.skip("it is biased")
    x = np.random.default_rng(3).standard_normal(96).astype(np.float32)
    draws = np.array([decode(codec, encode(codec, x, Key(0, 0, step)), x.size) for step in range(10_000)], np.float64)
    error = np.abs(draws.mean(0) - x) / (draws.std(0) / 100 + 1e-9)
    assert error.max() < 4.5  # the largest of 96 elements: 4 sigma would fail in one run of 160


@pytest.mark.parametrize("bits", range(2, 9))
def test_whole_numbers_are_within_half_a_step(bits: int) -> None:
    x = np.random.default_rng(bits).standard_normal(10_000).astype(np.float32)
    y = decode(compressor(f"int{bits}:256"), encode(compressor(f"int{bits}:256"), x), x.size)
    blocks = np.abs(np.pad(x, (0, -x.size % 256)).reshape(-1, 256)).max(1) / (2 ** (bits - 1) - 1)
    assert (np.abs(x - y) <= np.repeat(blocks, 256)[: x.size] * np.float32(0.50001)).all()
    z = decode(
        compressor(f"int{bits}:256:rounding=stochastic"),
        encode(compressor(f"int{bits}:256:rounding=stochastic"), x),
        x.size,
    )
    assert (np.abs(x - z) <= np.repeat(blocks, 256)[: x.size] * np.float32(1.00001)).all()


@pytest.mark.parametrize(
    ("spec", "error", "says"),
    [
        ("int9", UnknownCompressor, "'int9' is not one of"),
        ("", UnknownCompressor, "is not one of"),
        ("int8:block=33", ValueError, "block: 33"),
        ("int8:rounding=up", ValueError, "rounding: 'up'"),
        ("int8:bits=3", ValueError, "'bits=3' is not a setting"),
        ("int8:64:32", ValueError, "'32' is not a setting"),
        ("int8:block=x", ValueError, "'x' is not a whole number"),
        ("powersgd:0", ValueError, "rank: 0"),
        ("powersgd:rows=-1", ValueError, "rows: -1"),
        ("powersgd:shapes=3", ValueError, "'shapes=3' is not a setting of powersgd; its settings: rank, rows"),
        ("common:9", ValueError, "bits: 9"),
        ("fp16:3", ValueError, "'3' is not a setting"),
        ("fp8:31", ValueError, "block: 31"),
        ("e5m2:rounding=up", ValueError, "rounding: 'up'"),
        ("fp8:kind=e5m2", ValueError, "'kind=e5m2' is not a setting"),
        ("qsgd:128", ValueError, "levels: 128"),
        ("qsgd:bucket=100", ValueError, "bucket: 100"),
        ("ternary:32", ValueError, "block: 32 is not a multiple of 20"),
        ("ternary:clip=nan", ValueError, "clip: nan"),
        ("natural:0", ValueError, "block: 0"),
        ("error:0", ValueError, "bound: 0.0"),
        ("error:inf", ValueError, "bound: inf"),
        ("error:1e-3:block=131072", ValueError, "block: 131072"),
        (8, TypeError, "8 is neither"),
    ],
)
def test_wrong_specifications_say_what_is_wrong(spec: object, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        compressor(spec)  # type: ignore[arg-type]


@pytest.mark.parametrize("block", [32, 96, 1024])
def test_the_scale_of_signs_is_the_mean_of_the_block(block: int) -> None:
    x = np.random.default_rng(block).standard_normal(3 * block + 5).astype(np.float32)
    y = decode(compressor(f"sign:{block}"), encode(compressor(f"sign:{block}"), x), x.size)
    for begin in range(0, x.size, block):
        part = slice(begin, begin + block)
        np.testing.assert_allclose(y[part], np.sign(x[part]) * np.abs(x[part]).mean(), rtol=1e-6)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("scale", [2.0**-118, 1.0, 1e38, 3.4e38])
def test_no_code_overflows(bits: int, scale: float) -> None:
    x = (np.random.default_rng(bits).uniform(-1, 1, (200, 64)) * scale).astype(np.float32)
    x[:, 5] = np.abs(x).max(1)
    x[:, 40] = -x[:, 5]
    for rounding in ("nearest", "stochastic"):
        codec = compressor(f"int{bits}:64:rounding={rounding}")
        y = decode(codec, encode(codec, x.ravel()), x.size).reshape(x.shape)
        np.testing.assert_allclose(y[:, [5, 40]], x[:, [5, 40]], rtol=1e-6)
