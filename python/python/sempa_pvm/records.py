"""Frozen dataclasses that describe hosts, tasks, messages, notices and events."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._native import Task
    from .errors import PvmError


@dataclass(frozen=True, slots=True)
class Host:
    """A host of the virtual machine."""

    tid: int
    """The host's number as in PVM: the host part of tids."""
    name: str
    arch: str
    """The architecture, such as ``LINUX64``."""
    speed: int
    """The relative speed that the user has set; 1000 by default."""


@dataclass(frozen=True, slots=True)
class AddedHost:
    """The result of adding one host: the host, or the error."""

    host: Host | None
    error: PvmError | None


@dataclass(frozen=True, slots=True)
class TaskInfo:
    """A task of the virtual machine."""

    task: Task
    parent: Task | None
    host: str | None
    """The name of the host on which the task runs."""
    program: str
    """The name of the program; empty for a task from a command line."""
    pid: int
    """The process id that ``os.getpid()`` returns in the task."""
    is_migrating: bool
    is_paused: bool
    """True while the task is stopped for the owner of its host."""
    is_suspended: bool


@dataclass(frozen=True, slots=True)
class MessageInfo:
    """A message that has arrived and was not received."""

    sender: Task
    tag: int
    size: int
    """The number of bytes of the content."""


@dataclass(frozen=True, slots=True)
class MailboxEntry:
    """An entry of the mailbox."""

    name: str
    index: int
    owner: Task | None
    is_persistent: bool


@dataclass(frozen=True, slots=True)
class Migration:
    """A migration that has ended well."""

    image_bytes: int
    frozen_time: float
    """The time in seconds for which the task was stopped."""
    engine: str


@dataclass(frozen=True, slots=True)
class TaskEnded:
    """The task has ended. All messages that it had sent to this task have arrived."""

    task: Task


@dataclass(frozen=True, slots=True)
class HostRemoved:
    """The host has left the virtual machine, or was lost."""

    tid: int


@dataclass(frozen=True, slots=True)
class HostJoined:
    """The host has joined the virtual machine."""

    tid: int


Notice = TaskEnded | HostRemoved | HostJoined


@dataclass(frozen=True, slots=True)
class Event:
    """An entry of the event log."""

    number: int
    time: float
    """The time of the event in seconds since 1970, by the clock of its host."""
    host: str | None
    """The host on which the event happened."""
    text: str
    """A sentence for the user."""
    kind: str
    """The kind of the event, such as ``TaskEnded``."""
    details: dict[str, Any]
    """The values of the event, as ``pvm --json events`` prints them."""


def event_from_json(number: int, time: float, host: str | None, text: str, kind: str) -> Event:
    """Returns the event whose kind is given as JSON."""
    value: str | dict[str, Any] = json.loads(kind)
    if isinstance(value, str):
        return Event(number, time, host, text, value, {})
    name, content = next(iter(value.items()))
    details = content if isinstance(content, dict) else {"value": content}
    return Event(number, time, host, text, name, details)
