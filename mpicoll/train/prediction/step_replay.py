"""Replay of a recorded step on a described machine: when its collectives end, and how long the rank waits for them."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple, Protocol

from mpicoll.predict import crossover
from mpicoll.predict.predictor import PredictedCase, Prediction, predict
from mpicoll.schedules.machine import IDENTITY, MachineDescription, Wire
from mpicoll.train.prediction.recorded_collectives import CollectiveEvent, Event, RecordedStep


class StepTime(NamedTuple):
    """Predicted time of a step, or the mean over steps, in seconds.

    Attributes
    ----------
    computation
        Seconds that the rank computes.
    communication
        Seconds of all collectives, one after the other.
    waiting
        Seconds that the rank waits for them; the others overlap with computation.
    """

    computation: float
    communication: float
    waiting: float

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return self.computation + self.waiting


class PricedCollective(NamedTuple):
    """Predicted seconds of a collective.

    Attributes
    ----------
    messages
        Seconds of its messages, which may overlap with computation.
    processor
        Seconds of the rank's core, to reduce, encode and decode, which may not.
    """

    messages: float
    processor: float


class Pricing(Protocol):
    """Interface of what knows how long a collective takes."""

    def price(self, collective: str, nbytes: int, *, compressed: bool) -> PricedCollective:
        """Return the predicted seconds of a collective."""


class SimulatedPricing:
    """Seconds of collectives by the simulator, with the algorithm that ``"auto"`` takes; a :class:`Pricing`.

    Parameters
    ----------
    nodes
        Each rank's node.
    wire
        Compressor of compressed allreduces.
    """

    def __init__(self, machine: MachineDescription, nodes: tuple[int, ...], wire: Wire = IDENTITY) -> None:
        self._machine, self._nodes, self._wire = machine, nodes, wire
        self._kept = lru_cache(maxsize=None)(self._simulated)

    def price(self, collective: str, nbytes: int, *, compressed: bool) -> PricedCollective:
        """See :class:`Pricing`; nothing on one rank."""
        return self._kept(collective, nbytes, compressed)

    def _simulated(self, collective: str, nbytes: int, compressed: bool) -> PricedCollective:
        if len(self._nodes) == 1:
            return PricedCollective(0.0, 0.0)
        case = PredictedCase(collective, self._nodes, nbytes)
        found = (
            self._compressed(case)
            if compressed
            else predict(self._machine, case, crossover.algorithm(self._machine, case))
        )
        return PricedCollective(found.latency + found.sending, found.reducing)

    def _compressed(self, case: PredictedCase) -> Prediction:
        # Corrections were fitted for uncompressed messages.
        machine = replace(self._machine, corrections={})
        return predict(machine, case, crossover.algorithm(machine, case, self._wire), wire=self._wire)


def replay(step: RecordedStep, pricing: Pricing) -> StepTime:
    """Return the time of a step whose collectives take as long as `pricing` says.

    Collectives follow each other on the link of the rank. Messages of a nonblocking one go on while the rank computes;
    it reduces, encodes and decodes when it waits.
    """
    clock = link = computation = communication = 0.0
    under_way: dict[int, tuple[float, float]] = {}
    for event in step.events:
        clock, computation = clock + event.computed, computation + event.computed
        if event.kind is Event.WAIT:
            end, processor = under_way.pop(event.request)
            clock = max(clock, end) + processor
            continue
        messages, processor = _price(event, pricing)
        communication += messages + processor
        link = max(clock, link) + messages
        if event.kind is Event.START:
            under_way[event.request] = link, processor
        else:
            clock = link = link + processor
    clock, computation = clock + step.computed, computation + step.computed
    return StepTime(computation, communication, clock - computation)


def _price(event: CollectiveEvent, pricing: Pricing) -> PricedCollective:
    return pricing.price(event.collective, event.nbytes, compressed=event.compressed)
