"""Waiting for messages in coroutines.

A native thread of the task wakes an event loop when a message arrives for which a
coroutine of the loop waits. The coroutine then takes the message itself, so a coroutine that is
cancelled has taken nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakKeyDictionary

from ._native import EventStream, LoopWaker, Message, Notices, Task, Vm, Watch
from .records import Event, Notice

T = TypeVar("T")


class _End:
    """Stands for the end of an iterator."""


class _LoopWatches:
    """The waker of one event loop, and the coroutines that wait for messages."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._waker = LoopWaker()
        self._waiting: dict[Watch, asyncio.Future[None]] = {}
        loop.add_reader(self._waker.fileno(), self._wake_signalled)

    @property
    def waker(self) -> LoopWaker:
        return self._waker

    async def wait(self, loop: asyncio.AbstractEventLoop, watch: Watch) -> None:
        """Waits until the watch is signalled."""
        while not watch.is_signalled():
            future: asyncio.Future[None] = loop.create_future()
            self._waiting[watch] = future
            try:
                await future
            finally:
                del self._waiting[watch]

    def _wake_signalled(self) -> None:
        self._waker.clear()
        for watch, future in self._waiting.items():
            if watch.is_signalled() and not future.done():
                future.set_result(None)


_watches_of_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopWatches] = WeakKeyDictionary()


def _watches_of(loop: asyncio.AbstractEventLoop) -> _LoopWatches:
    loop_watches = _watches_of_loops.get(loop)
    if loop_watches is None:
        loop_watches = _watches_of_loops[loop] = _LoopWatches(loop)
    return loop_watches


async def _next_item(take: Callable[[], T | None], watch_with: Callable[[LoopWaker], Watch]) -> T:
    """Returns the next item that `take` returns, as soon as there is one."""
    item = take()
    if item is not None:
        return item
    loop = asyncio.get_running_loop()
    loop_watches = _watches_of(loop)
    watch = watch_with(loop_watches.waker)
    try:
        while True:
            await loop_watches.wait(loop, watch)
            # Nothing between this call and the end of the coroutine can be cancelled.
            item = take()
            if item is not None:
                return item
            watch.rearm()
    finally:
        watch.close()


async def recv(vm: Vm, source: Task | int | None, tag: int | None) -> Message:
    """Waits for a message."""
    return await _next_item(
        lambda: vm.try_recv(source, tag),
        lambda waker: vm._watch(source, tag, waker),
    )


async def next_notice(stream: Notices | EventStream) -> Notice | Event:
    """Waits for the next notice or event of an iterator."""

    def take() -> Notice | Event | _End | None:
        item = stream.try_get()
        return _End() if item is None and stream.is_exhausted else item

    item: Notice | Event | _End = await _next_item(take, stream._watch)
    if isinstance(item, _End):
        raise StopAsyncIteration
    return item
