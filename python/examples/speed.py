"""Measures the round trip of small messages, and the rate of large arrays, between two tasks.

Usage: speed.py [HOST]; the peer runs on this host, or on HOST.
"""

import sys
import time

import sempa_pvm as pvm

TAG = 1
ROUND_TRIPS = 20_000
ROUNDS_EACH = 5
SIZES_MIB = [1, 16, 64]


def answer(vm: pvm.Vm, parent: pvm.Task) -> None:
    """Sends small messages back; acknowledges large ones; ends after an empty one."""
    while size := len(message := parent.recv(TAG)):
        if size < 1000:
            parent.send(TAG, message.data)
        else:
            view = message.array()
            assert view[0] == view[-1] == 1.0
            del message, view
            parent.send(TAG, b"got it")


def measure_round_trip(peer: pvm.Task) -> None:
    best = float("inf")
    for _ in range(ROUNDS_EACH):
        start = time.perf_counter()
        for _ in range(ROUND_TRIPS):
            peer.send(TAG, b"12345678")
            peer.recv(TAG)
        best = min(best, (time.perf_counter() - start) / ROUND_TRIPS)
    print(f"round trip of 8 bytes: {best * 1e6:.1f} us")


def measure_rate(peer: pvm.Task, mebibytes: int) -> None:
    import numpy

    sent = numpy.ones(mebibytes << 17)
    best = float("inf")
    for _ in range(ROUNDS_EACH + 1):
        start = time.perf_counter()
        peer.send_array(TAG, sent)
        peer.recv(TAG)
        best = min(best, time.perf_counter() - start)
    print(f"array of {mebibytes} MiB: {sent.nbytes / best / 1e6:.0f} MB/s")


def main(vm: pvm.Vm) -> int:
    if vm.parent is not None:
        answer(vm, vm.parent)
        return 0
    host = sys.argv[1] if len(sys.argv) > 1 else "."
    (peer,) = vm.spawn(*pvm.python(__file__), host=host)
    measure_round_trip(peer)
    for mebibytes in SIZES_MIB:
        measure_rate(peer, mebibytes)
    peer.send(TAG)
    return 0


if __name__ == "__main__":
    pvm.run(main)
