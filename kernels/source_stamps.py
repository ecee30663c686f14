"""Files from which a kernel is compiled: when one of them changes, its machine code on disk is stale."""

import functools
from collections.abc import Callable
from pathlib import Path

# Files with helpers, or constants, that kernels of other files use: a change here makes those kernels stale.
_SHARED_FILES = (
    "atomics.py",
    "bits.py",
    "elementwise.py",
    "address_calls.py",
    "intrinsics.py",
    "overloads.py",
)
"""Used by any kernel."""
_CODEC_FILES = (
    "codecs/bit_packing.py",
    "codecs/block_norms.py",
    "codecs/codec_kernels.py",
    "codecs/counter_random.py",
    "codecs/integer_codec.py",
    "codecs/sampling.py",
    "codecs/sparse_encoding.py",
    "codecs/sparse_vectors.py",
    "codecs/threshold_masks.py",
    "codecs/topk.py",
)
"""Used by the kernels of codecs."""
_PLAN_FILES = (
    "buffer_views.py",
    "builtin_objects.py",
    "call_cache.py",
    "call_records.py",
    "codecs/counter_random.py",
    "compared_calls.py",
    "composition.py",
    "counted_parts.py",
    "dispatch.py",
    "dispatch_arguments.py",
    "dispatch_table.py",
    "executor.py",
    "futex.py",
    "gathered_parts.py",
    "instructions.py",
    "known_reductions.py",
    "messages.py",
    "method_trials.py",
    "movement.py",
    "nonblocking_calls.py",
    "object_arrays.py",
    "object_calls.py",
    "object_items.py",
    "object_kernels.py",
    "object_numbers.py",
    "object_parts.py",
    "object_pickles.py",
    "object_records.py",
    "object_reductions.py",
    "object_scalars.py",
    "object_words.py",
    "python_interface.py",
    "operands.py",
    "operation_words.py",
    "packed_blocks.py",
    "packed_views.py",
    "part_offers.py",
    "reduce.py",
    "scattered_parts.py",
    "strided_copy.py",
    "uneven_parts.py",
    "vector_specs.py",
)
"""Used by the kernels of `_PLAN_USERS`."""
_PLAN_USERS = (
    "builtin_objects",
    "compared_calls",
    "composition",
    "counted_calls",
    "counted_parts",
    "dispatch",
    "dispatch_arguments",
    "driven_jobs",
    "executor",
    "known_reductions",
    "method_trials",
    "nonblocking_calls",
    "object_arrays",
    "object_calls",
    "object_items",
    "object_numbers",
    "object_parts",
    "object_pickles",
    "object_records",
    "object_reductions",
    "object_scalars",
    "one_rank_calls",
    "packed_blocks",
    "packed_views",
    "uneven_calls",
    "uneven_parts",
    "vector_checks",
    "withdrawal",
)
_EXCHANGE_FILES = (
    "block_exchange.py",
    "block_offers.py",
    "buffer_views.py",
    "builtin_objects.py",
    "dispatch.py",
    "dispatch_arguments.py",
    "dispatch_table.py",
    "exchange_methods.py",
    "exchange_words.py",
    "method_trials.py",
    "object_kernels.py",
    "operation_words.py",
    "packed_views.py",
    "process_copy.py",
    "exchange_calls.py",
    "strided_copy.py",
    "vector_specs.py",
)
"""Used by the kernels of `_EXCHANGE_USERS`."""
_EXCHANGE_USERS = ("block_exchange", "block_offers", "exchange_methods", "exchange_calls", "typed_specs")
_RANDOM_FILES = ("codecs/counter_random.py",)
"""Used by the kernels of `_RANDOM_USERS`, and of codecs."""
_RANDOM_USERS = ("network_layers",)


def entry_name(function: Callable) -> str:
    """Return the name of a function's entries on disk; "" for one that is not of a file of this package.

    A function that is made at run time has the name in its attribute `entry_name`.
    """
    if hasattr(function, "entry_name"):
        return function.entry_name
    inside = function.__module__.startswith(f"{__package__}.") and function.__closure__ is None
    return f"{function.__module__.removeprefix(f'{__package__}.')}.{function.__name__}" * inside


@functools.cache
def stamp_of(module: str) -> list:
    """Return what changes when a file does that kernels of this module use."""
    inside = module.removeprefix(f"{__package__}.").replace(".", "/")
    package, _, name = module.rpartition(".")
    names = {f"{inside}.py", *_SHARED_FILES}
    names.update(_PLAN_FILES * (name in _PLAN_USERS) + _EXCHANGE_FILES * (name in _EXCHANGE_USERS))
    names.update(_RANDOM_FILES * (name in _RANDOM_USERS))
    names.update(_CODEC_FILES * package.endswith("codecs"))
    stats = [(Path(__file__).parent / name).stat() for name in sorted(names)]
    return [[stat.st_mtime_ns, stat.st_size] for stat in stats]
