"""Storage of a population: states and history in a folder of checkpoints, one after each generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mpicoll import Intracomm
from mpicoll.checkpoint import Checkpoint, CheckpointStore, PerRank
from mpicoll.errors import CheckpointFailed, UsageError
from mpicoll.search.member_transfer import State
from mpicoll.search.population_settings import MemberRecord, PopulationSettings, as_json, from_json

if TYPE_CHECKING:
    from mpicoll.search.population_member import Member


class SavedPopulation(NamedTuple):
    """A population from its storage.

    Attributes
    ----------
    checkpoint
        Its newest checkpoint.
    history, params
        Records of all generations, and the hyper-parameters of each member in the next one.
    """

    checkpoint: Checkpoint
    history: list[MemberRecord]
    params: list[dict[str, Any]]

    def states(self, numbers: Sequence[int]) -> dict[int, State]:
        """Return this rank's states of some members.

        Raises
        ------
        CheckpointFailed
            If one is missing or damaged.
        """
        found: dict[int, State] = {number: {} for number in numbers}
        for name in self.checkpoint.per_rank_names:
            member, _, rest = name.removeprefix("member").partition(".")
            if member.isdecimal() and int(member) in found:
                arrays = self.checkpoint.per_rank(name)
                if arrays:
                    found[int(member)][rest] = arrays[0]
        return found


class PopulationStorage:
    """Storage of a population in a folder, or nowhere; collective over `comm`, but for `close`.

    Raises
    ------
    CheckpointError
        On every rank, if the folder cannot be written, or another job is working on it.
    """

    def __init__(self, settings: PopulationSettings, comm: Intracomm, group: int) -> None:
        self._identity = {**settings.identity(), "ranks": comm.size, "group": group}
        self._store = None if settings.storage is None else CheckpointStore(settings.storage, comm)
        self._folder, self._members = settings.storage, settings.members

    def find(self) -> SavedPopulation | None:
        """Return the population in the folder; None if there is none.

        Raises
        ------
        UsageError
            On every rank, if it has other settings; the message names them.
        CheckpointError
            On every rank, if it is damaged.
        """
        if self._store is None or not self._store.steps():
            return None
        found = self._store.open(fallback=True)
        facts = found.facts
        there = facts.get("population")
        if not isinstance(there, dict):
            raise UsageError(f"--storage {self._folder}: holds checkpoints, but not of a population")
        odd = [name for name, value in self._identity.items() if there.get(name) != value]
        if odd:
            told = "; ".join(f"{name} was {there.get(name)}, is {self._identity[name]}" for name in odd)
            raise UsageError(f"--storage {self._folder}: is of another population: {told}")
        try:
            history = [from_json(each) for each in facts["history"]]
            params = [dict(each) for each in facts["params"]]
            if len(params) != self._members or len(history) != found.step * self._members:
                raise ValueError(f"{len(history)} records after {found.step} generations")
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointFailed(f"{self._folder}: its history is damaged: {error}") from None
        return SavedPopulation(found, history, params)

    def save(
        self,
        generations: int,
        members: Mapping[int, Member],
        history: Sequence[MemberRecord],
        params: Sequence[Mapping[str, Any]],
    ) -> None:
        """Save the population after so many generations.

        Raises
        ------
        CheckpointError
            On every rank; what was saved before is kept.
        """
        if self._store is None:
            return
        tensors = {
            f"member{number}.{name}": PerRank(array)
            for number, member in members.items()
            for name, array in member.state().items()
        }
        facts = {
            "population": self._identity,
            "history": [as_json(record) for record in history],
            "params": [dict(each) for each in params],
        }
        self._store.save(generations, tensors, facts)

    def close(self) -> None:
        """Let other jobs use the folder; not collective."""
        if self._store is not None:
            self._store.close()
