"""Exceptions of the package.

Each exception is a :class:`PvmError`. ``str(error)`` is a sentence for the user: what was tried,
what happened, and what to do. ``error.code`` is PVM's number, such as -31, and ``error.name`` its
name in ``pvm3.h``, such as ``PvmNoTask``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._native import Task

_NAMES: dict[int, str] = {
    -2: "PvmBadParam",
    -3: "PvmMismatch",
    -4: "PvmOverflow",
    -5: "PvmNoData",
    -6: "PvmNoHost",
    -7: "PvmNoFile",
    -8: "PvmDenied",
    -10: "PvmNoMem",
    -12: "PvmBadMsg",
    -14: "PvmSysErr",
    -15: "PvmNoBuf",
    -16: "PvmNoSuchBuf",
    -17: "PvmNullGroup",
    -18: "PvmDupGroup",
    -19: "PvmNoGroup",
    -20: "PvmNotInGroup",
    -21: "PvmNoInst",
    -22: "PvmHostFail",
    -23: "PvmNoParent",
    -24: "PvmNotImpl",
    -25: "PvmDSysErr",
    -26: "PvmBadVersion",
    -27: "PvmOutOfRes",
    -28: "PvmDupHost",
    -29: "PvmCantStart",
    -30: "PvmAlready",
    -31: "PvmNoTask",
    -32: "PvmNotFound",
    -33: "PvmExists",
    -34: "PvmHostrNMstr",
    -35: "PvmParentNotSet",
    -36: "PvmIPLoopback",
}


class PvmError(Exception):
    """A request failed."""

    reason: str
    code: int

    def __init__(self, reason: str, code: int = 0) -> None:
        super().__init__(reason, code)
        self.reason = reason
        self.code = code

    @property
    def name(self) -> str:
        """The name of the code in ``pvm3.h``; empty if there is none."""
        return _NAMES.get(self.code, "")

    def __str__(self) -> str:
        return self.reason


class NotEnrolledError(PvmError):
    """This process is not a task.

    No daemon answers, the connection to it is lost, the process has called ``exit``, or it is a
    child that was forked from a task.
    """


class BadMessageError(PvmError):
    """A message does not contain what was to be read from it."""


class EndOfMessageError(BadMessageError):
    """A message has fewer items than were to be read."""


class NoHostError(PvmError):
    """The host is not in the virtual machine, or was lost."""


class NoFileError(PvmError):
    """The program does not exist on the host."""


class NoTaskError(PvmError):
    """The task has ended, or never existed."""


class DeniedError(PvmError):
    """The operation is not permitted, or a mailbox entry belongs to another task."""


class OutOfResourcesError(PvmError):
    """A limit of the virtual machine or of a host was reached."""


class GroupError(PvmError):
    """A request to a group failed: no such group, not a member, or a member already."""


class NotFoundError(PvmError):
    """The mailbox has no such entry."""


class MigrationError(PvmError):
    """A migration began and failed. The task continues on its host."""


class WorkError(PvmError):
    """A master-worker run did not begin, or ended early. The text says what remains of its results.

    ``kind`` is ``"start"``, ``"driver"``, ``"journal"``, ``"quarantine"``, ``"disconnected"``,
    ``"worker"``, ``"stopped"`` or ``"call"``.
    """

    kind: str

    def __init__(self, reason: str, kind: str = "") -> None:
        super().__init__(reason)
        self.kind = kind


class BrokerError(PvmError):
    """A call of a member of a broker session failed.

    ``kind`` is ``"over"``, ``"gone"``, ``"refused"``, ``"session file"``, ``"no broker"`` or
    ``"system"``. ``exit_status`` is the status for a program that ends because of the error.
    """

    kind: str
    exit_status: int = 1

    def __init__(self, reason: str, kind: str = "") -> None:
        super().__init__(reason)
        self.kind = kind


class SessionOverError(BrokerError):
    """The session is over. A program that meets this error ends with ``exit_status``."""

    exit_status: int = 79


class SpawnError(PvmError):
    """Tasks of a spawn were not started. The others run."""

    tasks: list[Task]
    """The tasks that were started."""
    codes: list[int]
    """PVM's error code of each task that was not started."""

    def __init__(self, reason: str, code: int = 0) -> None:
        super().__init__(reason, code)
        self.tasks = []
        self.codes = [code]


_CLASSES: dict[int, type[PvmError]] = {
    -3: GroupError,
    -5: EndOfMessageError,
    -6: NoHostError,
    -7: NoFileError,
    -8: DeniedError,
    -10: OutOfResourcesError,
    -12: BadMessageError,
    -14: NotEnrolledError,
    -17: GroupError,
    -18: GroupError,
    -19: GroupError,
    -20: GroupError,
    -21: GroupError,
    -22: NoHostError,
    -27: OutOfResourcesError,
    -31: NoTaskError,
    -32: NotFoundError,
}


def from_code(reason: str, code: int) -> PvmError:
    """Returns the exception for an error code of PVM."""
    return _CLASSES.get(code, PvmError)(reason, code)


def migration_failed(reason: str) -> MigrationError:
    """Returns the exception for a migration that began and failed."""
    return MigrationError(reason)


def spawn_failed(reason: str, tasks: list[Task], codes: list[int]) -> SpawnError:
    """Returns the exception for a spawn of which tasks were not started."""
    error = SpawnError(reason, codes[0])
    error.tasks = tasks
    error.codes = codes
    return error


def work_failed(reason: str, kind: str) -> WorkError:
    """Returns the exception for a run that did not begin or ended early."""
    return WorkError(reason, kind)


def broker_failed(reason: str, kind: str) -> BrokerError:
    """Returns the exception for a failed call of a member."""
    return (SessionOverError if kind == "over" else BrokerError)(reason, kind)


for _error_class in [PvmError, *PvmError.__subclasses__(), EndOfMessageError, SessionOverError]:
    # Tracebacks name the module from which programs import the class.
    _error_class.__module__ = "sempa_pvm"
