"""Team: threads that go through one kernel together, each with its share of every product, and wait for each other.

What a thread computes does not depend on how many there are, so that their number is free: a row's bits stay the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from vidspec_models.backends.cpu.layers import compiled

_I64 = ir.IntType(64)
_WORD = 8  # bytes
_SPINS = 2000  # some microseconds; then whoever waits for this core may have it
_YIELDS = 1000  # half a millisecond; then whoever waits for another core may come over
_NAP_US = 50
_PATIENCE = 2**20  # naps; a minute at least


class Member(NamedTuple):
    """One of a team's threads."""

    number: int  # from 0
    team_size: int
    meeting: int  # address of two int64, 0 at the beginning: how many have come to a meeting so far, and `num_naps`


@compiled
def share(member: Member, total: int) -> tuple[int, int]:
    """First and last of a member's part of so many things that all have to be done."""
    return total * member.number // member.team_size, total * (member.number + 1) // member.team_size


@compiled
def meet(member: Member) -> None:
    """Wait until all are here; what any of them has written, all can read afterwards.

    Raises RuntimeError where one does not come for a minute: it has failed.
    """
    if member.team_size == 1:
        return
    awaited = (_add_one(member.meeting) // member.team_size + 1) * member.team_size
    tries = 0
    while _number_at(member.meeting) < awaited:
        tries += 1
        if tries > _SPINS + _YIELDS + _PATIENCE:
            raise RuntimeError("a thread of the team is missing")
        if tries > _SPINS + _YIELDS:
            _nap()  # a core that is never idle is not given another one's work for a long time
            _add_one(member.meeting + _WORD)
        elif tries > _SPINS:
            _give_way()


@compiled
def num_naps(member: Member) -> int:
    """How often one has slept a tenth of a millisecond, waiting for another: who has no core, in short."""
    return int(_number_at(member.meeting + _WORD))


@intrinsic
def _add_one(_typing: Any, place: Any) -> Any:
    """What was there before."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], _I64.as_pointer())
        return builder.atomic_rmw("add", pointer, ir.Constant(_I64, 1), "acq_rel")

    return types.int64(place), generate


@intrinsic
def _number_at(_typing: Any, place: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(arguments[0], _I64.as_pointer()), "acquire", 8)

    return types.int64(place), generate


@intrinsic
def _give_way(_typing: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.none(), generate


@intrinsic
def _nap(_typing: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [ir.IntType(32)])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "usleep"), [ir.IntType(32)(_NAP_US)])
        return context.get_dummy_value()

    return types.none(), generate
