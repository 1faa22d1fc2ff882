"""Four tasks sum the squares of parts of an array.

Usage: sums.py [NUMBERS]
"""

import sys
from array import array

import sempa_pvm as pvm

TAG_PART = 1
TAG_SUM = 2
WORKERS = 4


def work(vm: pvm.Vm, parent: pvm.Task) -> None:
    part = parent.recv(TAG_PART).array()
    parent.send_object(TAG_SUM, sum(number * number for number in part))


def main(vm: pvm.Vm) -> int:
    if vm.parent is not None:
        work(vm, vm.parent)
        return 0
    numbers = array("q", range(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000))
    workers = vm.spawn(*pvm.python(__file__), count=WORKERS)
    for number, worker in enumerate(workers):
        worker.send_array(TAG_PART, numbers[number::WORKERS])
    with vm.watch_tasks(workers) as ended:
        total = 0
        for notice in ended:
            # The notice comes after the last message of the task.
            assert isinstance(notice, pvm.TaskEnded)
            answer = notice.task.try_recv(TAG_SUM)
            if answer is None:
                print(f"{notice.task} has ended without an answer", file=sys.stderr)
                return 1
            total += answer.object()
    print(f"the sum of {len(numbers)} squares is {total}")
    return 0


if __name__ == "__main__":
    pvm.run(main)
