"""Mail, answers and reports of broker sessions."""

from __future__ import annotations

import asyncio
import enum
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._native import Member


class Result(enum.Enum):
    """What the broker did with a request."""

    TAKEN = "taken"
    """The broker has the message: the receiver gets it, or it comes back or counts as dropped."""
    DONE = "done"
    """The request is carried out."""
    GONE = "gone"
    """The receiver is gone; the broker did not keep the message."""
    UNKNOWN = "unknown"
    """No member has had this number."""
    NO_FOREMAN = "no foreman"
    """The session has no foreman at the moment."""
    FULL = "full"
    """A limit is reached; the broker did not keep the message."""
    NOT_ALLOWED = "not allowed"
    """The role of this member does not allow the request."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The broker's answer to a request. True if the request was accepted."""

    result: Result
    reason: str | None
    """Why the receiver is gone."""
    limit: str | None
    """The name of the limit that is reached."""

    def __bool__(self) -> bool:
        return self.result in (Result.TAKEN, Result.DONE)


def answer(name: str, reason: str | None, limit: str | None) -> Answer:
    """Returns the answer with the result of this name."""
    return Answer(Result(name), reason, limit)


@dataclass(frozen=True, slots=True)
class Message:
    """A message of another member."""

    sender: int
    kind: int
    data: memoryview
    """The content, read-only and without a copy."""


@dataclass(frozen=True, slots=True)
class Gone:
    """A watched member is gone. All its messages have come before."""

    member: int
    reason: str
    undelivered: int
    """Number of messages that the member had not received."""


@dataclass(frozen=True, slots=True)
class Returned:
    """A message of this member that its receiver did not receive."""

    to: int
    kind: int
    data: memoryview
    reason: str
    """Why the receiver is gone."""


Mail = Message | Gone | Returned


@dataclass(frozen=True, slots=True)
class MailInfo:
    """Mail that has arrived and was not received."""

    source: int
    """The sender; for other mail the member that is gone, or the receiver of the message."""
    kind: int
    """The kind of the message, :data:`GONE` or :data:`RETURNED`."""
    size: int
    """Number of bytes of the content."""


@dataclass(frozen=True, slots=True)
class MemberInfo:
    """A member of a session."""

    id: int
    state: str
    """``joining``, ``present``, ``away`` or ``gone``."""
    reason: str | None
    """Why the member is gone."""
    is_foreman: bool
    host: str
    program: str
    factor: int
    tid: int | None
    """The member's task; None outside the virtual machine."""
    sent: int
    received: int
    waiting: int
    """Messages that wait for the member."""


@dataclass(frozen=True, slots=True)
class Report:
    """A session and its members."""

    session: str
    end: str | None
    """Why the session ends or has ended."""
    waiting: int
    counts: dict[str, int]
    members: list[MemberInfo]
    """Members that are not gone, then those that are gone."""


def _member_from(facts: dict[str, Any]) -> MemberInfo:
    state, profile, place = facts["state"], facts["profile"], facts["place"]
    is_gone = isinstance(state, dict)
    return MemberInfo(
        id=facts["member"],
        state="gone" if is_gone else state,
        reason=state["gone"] if is_gone else None,
        is_foreman=profile["role"] == "foreman",
        host=profile["host"],
        program=profile["program"],
        factor=profile["factor"],
        tid=place["inside"]["tid"] if isinstance(place, dict) else None,
        sent=facts["sent"],
        received=facts["received"],
        waiting=facts["waiting"],
    )


def report_from_json(text: str) -> Report:
    """Returns the report in a JSON text."""
    facts = json.loads(text)
    members = [_member_from(member) for member in facts["members"]]
    return Report(facts["session"], facts["end"], facts["waiting"], facts["counts"], members)


async def receive(member: Member, source: int | None, kind: int | None) -> Mail:
    """Waits for mail. Threads of the loop wait and take nothing; the coroutine takes the mail."""
    loop = asyncio.get_running_loop()
    while True:
        mail = member.try_recv(source, kind)
        if mail is not None:
            return mail
        await loop.run_in_executor(None, member._wait, source, kind)
