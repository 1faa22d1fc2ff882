"""Tasks of a Sempa virtual machine, or of PVM programs in it, in Python.

A process enrolls as a task, starts other tasks, and exchanges messages with them::

    import sempa_pvm as pvm

    with pvm.Vm.enroll() as vm:
        worker, = vm.spawn("worker")
        worker.send(1, b"some bytes")
        answer = vm.recv(worker, tag=2)
        print(bytes(answer))

:mod:`sempa_pvm.work` is for master-worker programs, :mod:`sempa_pvm.broker` for sessions of workers
that come and go. The documentation is in ``docs/PYTHON.md`` of Sempa.
"""

from ._native import (
    Content,
    EventStream,
    Group,
    Mailbox,
    Message,
    Notices,
    Packer,
    Task,
    Unpacker,
    Vm,
)
from ._run import python, run
from .errors import (
    BadMessageError,
    BrokerError,
    DeniedError,
    EndOfMessageError,
    GroupError,
    MigrationError,
    NoFileError,
    NoHostError,
    NoTaskError,
    NotEnrolledError,
    NotFoundError,
    OutOfResourcesError,
    PvmError,
    SessionOverError,
    SpawnError,
    WorkError,
)
from .records import (
    AddedHost,
    Event,
    Host,
    HostJoined,
    HostRemoved,
    MailboxEntry,
    MessageInfo,
    Migration,
    Notice,
    TaskEnded,
    TaskInfo,
)

__all__ = [
    "AddedHost",
    "BadMessageError",
    "BrokerError",
    "Content",
    "DeniedError",
    "EndOfMessageError",
    "Event",
    "EventStream",
    "Group",
    "GroupError",
    "Host",
    "HostJoined",
    "HostRemoved",
    "Mailbox",
    "MailboxEntry",
    "Message",
    "MessageInfo",
    "Migration",
    "MigrationError",
    "NoFileError",
    "NoHostError",
    "NoTaskError",
    "NotEnrolledError",
    "NotFoundError",
    "Notice",
    "Notices",
    "OutOfResourcesError",
    "Packer",
    "PvmError",
    "SessionOverError",
    "SpawnError",
    "Task",
    "TaskEnded",
    "TaskInfo",
    "Unpacker",
    "Vm",
    "WorkError",
    "python",
    "run",
]
