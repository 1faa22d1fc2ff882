"""Counts, and answers who asks, also after it has migrated. Its parent checks the answers.

Usage: py_counter.py
"""

import asyncio
import os

import sempa_pvm as pvm

TAG_ASK = 1
TAG_ANSWER = 2
WAIT = 60


async def count(vm, state):
    while True:
        question = await vm.arecv(tag=TAG_ASK)
        state["count"] += 1
        state["view"] = question.array()
        answer = (state["count"], vm.host, os.getpid(), sum(state["view"]), vm.tid)
        question.sender.send_object(TAG_ANSWER, answer)


def main(vm):
    if vm.parent is not None:
        asyncio.run(count(vm, {"count": 0}))
    (counter,) = vm.spawn(*pvm.python(__file__), host="h1")
    numbers = memoryview(bytes(range(250)) * 8000).cast("B")
    pids = set()
    for expected, target in enumerate(["h2", "h1", None], start=1):
        counter.send_array(TAG_ASK, numbers)
        number, host, pid, total, tid = counter.recv(TAG_ANSWER, WAIT).object()
        assert (number, total, tid) == (expected, sum(numbers), counter.tid), (number, total, tid)
        assert host == ("h2" if expected == 2 else "h1"), host
        pids.add(pid)
        if target is not None:
            assert target in counter.migration_targets(), counter.migration_targets()
            migration = counter.migrate(target)
            assert migration.image_bytes > 0 and migration.frozen_time > 0, migration
    assert len(pids) == 1, pids
    try:
        counter.migrate("h9")
    except pvm.MigrationError as error:
        assert "the task continues on its host" in str(error), error
    else:
        raise AssertionError("no error")
    counter.kill()
    print("the counter went on")
    return 0


if __name__ == "__main__":
    pvm.run(main)
