"""Forms of a call: blocking, nonblocking, persistent."""

from __future__ import annotations

from typing import Any

from mpicoll import Intracomm

FORMS = ("blocking", "nonblocking", "persistent")


def make(comm: Intracomm, form: str, name: str, *arguments: Any, starts: int = 1, **settings: Any) -> None:
    """Make a call of a collective in one of the forms, a persistent one `starts` times, and wait for its end."""
    if form == "blocking":
        getattr(comm, name.capitalize())(*arguments, **settings)
    elif form == "nonblocking":
        getattr(comm, f"I{name}")(*arguments, **settings).Wait()
    else:
        request = getattr(comm, f"{name.capitalize()}_init")(*arguments, **settings)
        for _ in range(starts):
            request.Start()
            request.Wait()
        request.Free()
