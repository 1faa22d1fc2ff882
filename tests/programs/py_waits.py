"""Waits in the way that the argument names, until a signal interrupts the wait.

Usage: py_waits.py recv|notices|barrier|mailbox|events|asyncio|work
"""

import asyncio
import sys
import time

import sempa_pvm as pvm
from sempa_pvm import work


def wait(vm, way):
    group = vm.group("alone")
    if way == "recv":
        vm.recv(tag=1)
    elif way == "notices":
        next(vm.watch_tasks([vm.me]))
    elif way == "barrier":
        group.join()
        group.barrier(2)
    elif way == "mailbox":
        vm.mailbox.take("nothing", wait=True)
    elif way == "events":
        for _ in vm.watch_events():
            pass
    elif way == "asyncio":
        asyncio.run(vm.arecv(tag=1))
    elif way == "work":
        # The worker sleeps longer than the test waits.
        work.run([1000], time.sleep, on_result=print, workers=1, vm=vm)


def main(vm):
    vm.me.send(2, b"waits for tag 2")
    try:
        print(f"waiting {vm.me}", flush=True)
        wait(vm, sys.argv[1])
    except KeyboardInterrupt:
        # The task works as before.
        print(bytes(vm.recv(tag=2)).decode())
        return 0
    return 1


if __name__ == "__main__":
    pvm.run(main)
