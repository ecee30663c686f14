"""The primitive of JAX behind all collectives: executed in program order, with derivatives and batching.

XLA runs independent parts of a program in any order, several at a time. Collectives therefore have an *ordered effect*:
JAX passes a token from each to the next, through loops, branches and programs, and XLA respects it as it does any
other operand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from mpicoll.buffers.reduction_ops import name_of
from mpicoll.jax.collective_handler import TARGET, number_of
from mpicoll.jax.jax_communicators import Collective

_TRANSPOSED = {
    "allreduce": "allreduce",
    "bcast": "reduce",
    "reduce": "bcast",
    "allgather": "reduce_scatter",
    "reduce_scatter": "allgather",
    "alltoall": "alltoall",
}
"""The transposes of linear collectives, seen as one linear map on the vectors of all ranks."""


def _effect() -> Any:
    """Return the ordered effect of ``jax.debug.callback``, which JAX takes in all its transformations.

    Making one needs private functions of JAX. That of ``io_callback`` is refused by ``jax.checkpoint``.
    """
    program = jax.make_jaxpr(lambda: jax.debug.callback(lambda: None, ordered=True))()
    (effect,) = program.effects
    return effect


def _token() -> Any:
    """Return the abstract value of a token."""
    return jax.make_jaxpr(lambda: jax.lax.create_token())().out_avals[0]


_EFFECT, _TOKEN = _effect(), _token()
_primitive = Primitive("mpicoll_collective")
_primitive.multiple_results = True


def bind(collective: Collective, *arrays: Any) -> Any:
    """Run a collective on an array, or put it into the program that is traced; return its result.

    Parameters
    ----------
    collective
        One on vectors takes one array and returns one; a barrier takes none, and None is returned.
    """
    results = _primitive.bind(*arrays, collective=collective)
    return results[0] if results else None


def _shapes(collective: Collective, shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    if collective.kind == "allgather":
        return [(collective.group.size, *shape) for shape in shapes]
    if collective.kind == "reduce_scatter":
        return [shape[1:] for shape in shapes]
    return list(shapes)


def _abstract(*arrays: Any, collective: Collective) -> tuple[list[Any], set[Any]]:
    shapes = _shapes(collective, [each.shape for each in arrays])
    return [jax.core.ShapedArray(shape, each.dtype) for each, shape in zip(arrays, shapes, strict=True)], {_EFFECT}


def _lower(context: Any, *operands: Any, collective: Collective) -> Any:
    """Put a call of the handler into a program for the CPU, with the token as its first operand and result."""
    number = number_of(collective, context.avals_in, context.avals_out)
    with_token = context.replace(
        avals_in=(_TOKEN, *context.avals_in), avals_out=(_TOKEN, *context.avals_out), tokens_out=None
    )
    rule = jax.ffi.ffi_lowering(TARGET, has_side_effect=True)
    token, *results = rule(with_token, context.tokens_in.get(_EFFECT), *operands, number=np.int64(number))
    context.set_tokens_out(context.tokens_in.update_tokens(mlir.TokenSet({_EFFECT: token})))
    return results


def _lower_elsewhere(context: Any, *operands: Any, collective: Collective) -> Any:
    raise NotImplementedError(f"mpicoll.jax: {collective.kind} of arrays on an accelerator; only the CPU is supported")


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, collective: Collective) -> tuple[Any, Any]:
    check_linear(collective)
    results = _primitive.bind(*primals, collective=collective)
    return results, _primitive.bind(*tangents, collective=collective.other(collective.kind))


def check_linear(collective: Collective) -> None:
    """Raise NotImplementedError unless a collective has derivatives."""
    if name_of(collective.op) != "SUM":
        name = name_of(collective.op) or "an operation of MPI.Op.Create"
        raise NotImplementedError(f"mpicoll.jax.{collective.kind}: op {name} has no derivatives here, only SUM has")


def _transpose(cotangents: Sequence[Any], x: Any, *, collective: Collective) -> list[Any]:
    (cotangent,) = cotangents
    if type(cotangent) is ad.Zero:
        return [ad.Zero(x.aval)]
    return [bind(collective.other(_TRANSPOSED[collective.kind]), cotangent)]


def _batch(arrays: Sequence[Any], axes: Sequence[int], *, collective: Collective) -> tuple[list[Any], list[int]]:
    """Run one collective for the whole batch; its axis becomes the last one, which no collective looks at."""
    results = _primitive.bind(jnp.moveaxis(arrays[0], axes[0], -1), collective=collective)
    return results, [result.ndim - 1 for result in results]


def _eager(*arrays: Any, collective: Collective) -> Any:
    return _program(*arrays, collective=collective)


_program = jax.jit(_primitive.bind, static_argnames="collective")
_primitive.def_impl(_eager)
_primitive.def_effectful_abstract_eval(_abstract)
mlir.register_lowering(_primitive, _lower_elsewhere)
mlir.register_lowering(_primitive, _lower, platform="cpu")
ad.primitive_jvps[_primitive] = _jvp
ad.primitive_transposes[_primitive] = _transpose
batching.primitive_batchers[_primitive] = _batch
