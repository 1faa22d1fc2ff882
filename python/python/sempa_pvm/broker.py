"""Sessions of workers that come and go: messages between members through a broker.

A member joins, sends and receives::

    from sempa_pvm import broker

    with broker.join("search") as member:
        answer = member.send(broker.FOREMAN, 1, b"ready")
        mail = member.recv()
        if isinstance(mail, broker.Gone):
            print(mail.member, mail.reason)

The documentation is in ``docs/PYTHON.md`` and ``docs/BROKER.md`` of Sempa.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from ._broker_types import (
    Answer,
    Gone,
    Mail,
    MailInfo,
    MemberInfo,
    Message,
    Report,
    Result,
    Returned,
)
from ._native import Member, Vm
from .errors import BrokerError, PvmError, SessionOverError

__all__ = [
    "EXIT_OVER",
    "FOREMAN",
    "GONE",
    "RETURNED",
    "Answer",
    "BrokerError",
    "Gone",
    "Mail",
    "MailInfo",
    "Member",
    "MemberInfo",
    "Message",
    "Report",
    "Result",
    "Returned",
    "SessionOverError",
    "join",
    "run",
]

FOREMAN = 0
"""Stands for the foreman as the receiver of a message."""
GONE = -2
"""The kind of notices about members that are gone."""
RETURNED = -3
"""The kind of messages that come back."""
EXIT_OVER = SessionOverError.exit_status
"""Exit status of programs that come after the end of their session."""


def join(
    session: str | None = None,
    *,
    session_file: str | os.PathLike[str] | None = None,
    foreman: bool = False,
    factor: int = 0,
    broker_options: Sequence[str] = (),
    timeout: float = 60.0,
    vm: Vm | None = None,
) -> Member:
    """Joins a session of the virtual machine, or from outside with a session file.

    Without both, ``SEMPA_SESSION_FILE`` or ``SEMPA_SESSION`` names the session. The first member in
    the virtual machine starts the broker, with ``broker_options`` as for ``pvm-broker start``.
    ``factor`` is the speed in thousandths of a reference machine; ``vm`` is this process as a task,
    if the program has enrolled already.
    """
    return Member.join(
        session,
        session_file=session_file,
        foreman=foreman,
        factor=factor,
        broker_options=list(broker_options),
        timeout=timeout,
        vm=vm,
    )


def run(main: Callable[[], int | None]) -> NoReturn:
    """Calls ``main``, and exits with the status that ``main`` returns.

    If ``main`` does not handle a :class:`PvmError`, the program prints one sentence and exits with
    status 1, or with :data:`EXIT_OVER` if the session is over.
    """
    try:
        status = main()
    except PvmError as error:
        program = os.path.basename(sys.argv[0]) or "python"
        print(f"{program}: {error}", file=sys.stderr)
        sys.exit(error.exit_status if isinstance(error, BrokerError) else 1)
    sys.exit(status or 0)
