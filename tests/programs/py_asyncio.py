"""Checks coroutines that wait for messages, notices and events."""

import asyncio
import signal
import threading

import sempa_pvm as pvm

TAG_PING = 1
TAG_PONG = 2
WAIT = 60
ROUNDS = 200


def worker(vm):
    """Answers messages until an empty one comes; then waits for a signal."""
    while len(message := vm.recv(vm.parent, TAG_PING)):
        vm.parent.send(TAG_PONG, message.data)
    signal.pause()


async def ping(vm, worker, number):
    for round in range(ROUNDS):
        text = f"{number} {round}".encode()
        worker.send(TAG_PING, text)
        answer = await worker.arecv(TAG_PONG)
        assert bytes(answer) == text, (bytes(answer), text)
    return number


async def check_messages(vm, workers):
    numbers = await asyncio.gather(*(ping(vm, w, i) for i, w in enumerate(workers)))
    assert numbers == list(range(len(workers))), numbers
    # Two coroutines wait for the same kind of message: each gets one.
    waiting = [asyncio.create_task(vm.arecv(tag=TAG_PONG)) for _ in range(2)]
    await asyncio.sleep(0)
    for worker in workers[:2]:
        worker.send(TAG_PING, b"one for each")
    senders = {message.sender for message in await asyncio.gather(*waiting)}
    assert senders == set(workers[:2]), senders


async def check_cancelling(vm):
    # A message for which nobody waits does not wake the loop, and a cancelled wait takes nothing.
    vm.me.send(9, b"stays")
    waiting = asyncio.create_task(vm.arecv(tag=10))
    await asyncio.sleep(0)
    waiting.cancel()
    try:
        await waiting
    except asyncio.CancelledError:
        pass
    vm.me.send(10, b"not lost")
    assert bytes(await vm.arecv(tag=10)) == b"not lost"
    try:
        async with asyncio.timeout(0.05):
            await vm.arecv(tag=11)
    except TimeoutError:
        pass
    else:
        raise AssertionError("no timeout")
    # The message arrives, and its coroutine is cancelled before it runs.
    waiting = asyncio.create_task(vm.arecv(tag=12))
    while vm.probe(tag=12) is None:
        vm.me.send(12, b"still there")
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert bytes(await vm.arecv(tag=12)) == b"still there"
    assert bytes(await vm.arecv(vm.me)) == b"stays"


async def check_iterators(vm, workers):
    async def collect():
        return {notice.task async for notice in vm.watch_tasks(workers)}

    ended = asyncio.create_task(collect())
    stream = vm.watch_events()
    await asyncio.sleep(0)
    for worker in workers:
        worker.send(TAG_PING)
        worker.kill()
    assert await ended == set(workers)
    missing = {worker.tid for worker in workers}
    async for event in stream:
        if event.kind == "TaskEnded":
            missing.discard(event.details["tid"])
        if not missing:
            break
    stream.close()
    assert [event async for event in stream] == []


async def check_loss(vm):
    """A coroutine that waits when the task leaves gets the reason."""
    waiting = asyncio.create_task(vm.arecv())
    await asyncio.sleep(0)
    await asyncio.to_thread(vm.exit)
    try:
        await waiting
    except pvm.NotEnrolledError as error:
        assert "has left the virtual machine" in str(error), error
    else:
        raise AssertionError("no error")


async def check_all(vm, workers):
    await check_messages(vm, workers)
    await check_cancelling(vm)
    names = [thread.name for thread in threading.enumerate()]
    assert names == ["MainThread"], f"no Python thread waits: {names}"
    await check_iterators(vm, workers)


def main(vm):
    if vm.parent is not None:
        return worker(vm)
    workers = vm.spawn(*pvm.python(__file__), count=4)
    asyncio.run(check_all(vm, workers))
    # Another loop works as well as the first one.
    asyncio.run(check_cancelling(vm))
    asyncio.run(check_loss(vm))
    print("coroutines are right")
    return 0


if __name__ == "__main__":
    pvm.run(main)
