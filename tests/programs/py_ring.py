"""A token goes round a ring of Python tasks and one task in C, which adds 1 as they do.

Usage: py_ring.py ROUNDS
"""

import sys

import sempa_pvm as pvm

TAG_NEXT = 1
TAG_TOKEN = 2
MEMBERS = 5


def member(vm):
    setup = vm.recv(vm.parent, TAG_NEXT).unpacker()
    following, rounds = vm.task(setup.unpack_int()), setup.unpack_int()
    for _ in range(rounds):
        token = vm.recv(tag=TAG_TOKEN).unpacker()
        value, weight, name = token.unpack_int(), token.unpack_double(), token.unpack_str()
        answer = pvm.Packer().pack_int(value + 1).pack_double(weight / 2).pack_str(name)
        following.send(TAG_TOKEN, answer)


def main(vm):
    if vm.parent is not None:
        return member(vm)
    rounds = int(sys.argv[1])
    tasks = vm.spawn(*pvm.python(__file__), count=MEMBERS - 1)
    tasks[2:2] = vm.spawn("py_ring_link", host="h2")
    following = tasks[1:] + [vm.me]
    for task, next_task in zip(tasks, following):
        task.send(TAG_NEXT, pvm.Packer().pack_int(next_task.tid, rounds))
    value, weight, name = 0, 1.0, "tökén"
    for _ in range(rounds):
        token = pvm.Packer().pack_int(value).pack_double(weight).pack_str(name)
        tasks[0].send(TAG_TOKEN, token)
        items = vm.recv(tasks[-1], TAG_TOKEN).unpacker()
        value, weight, name = items.unpack_int(), items.unpack_double(), items.unpack_str()
        weight *= 2**MEMBERS
    print(f"the {name} is {value} and weighs {weight} after {rounds} rounds of {len(tasks)} tasks")
    return 0


if __name__ == "__main__":
    pvm.run(main)
