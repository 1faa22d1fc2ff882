"""Checks groups, mailbox, tables, spawns, waits, notices and events.

Usage: py_services.py; needs a virtual machine of the hosts h1 and h2.
"""

import os
import signal
import threading
import time

import sempa_pvm as pvm

TAG_WORK = 1
TAG_DONE = 2
WAIT = 60


def raises(error_class, function, *args, **kwargs):
    """Returns the exception that a call raises, which must be of this class."""
    try:
        value = function(*args, **kwargs)
    except error_class as error:
        return error
    raise AssertionError(f"no {error_class.__name__}, but {value!r}")


def worker(vm):
    """Joins the group, waits for all, answers a broadcast, and waits for the signal that ends it."""
    group = vm.group("crew")
    number = group.join()
    group.barrier(4)
    work = vm.recv(tag=TAG_WORK)
    vm.parent.send_object(TAG_DONE, (number, work.object(), os.getpid(), vm.host))
    vm.recv(tag=TAG_WORK)


def check_group(vm, workers):
    with vm.group("crew") as group:
        group.barrier(4)
        members = group.members()
        assert len(group) == 4 and set(members) == {vm.me, *workers}, members
        assert vm.groups() == ["crew"]
        group.broadcast(TAG_WORK, pvm.Content.object({"size": 3}))
        answers = [vm.recv(tag=TAG_DONE, timeout=WAIT) for _ in workers]
        assert {answer.sender for answer in answers} == set(workers)
        numbers = {answer.object()[0] for answer in answers}
        assert len(numbers) == 3 and all(a.object()[1] == {"size": 3} for a in answers)
        assert vm.try_recv() is None, "a broadcast does not come back to its sender"
        error = raises(pvm.GroupError, group.join)
        assert error.name == "PvmDupGroup", error
    raises(pvm.GroupError, vm.group("crew").leave)
    raises(pvm.GroupError, vm.group("no such").members)


def check_tables(vm, workers):
    hosts = vm.config()
    assert [host.name for host in hosts] == ["h1", "h2"] and hosts[0].arch == "LINUX64"
    own_pids = {a.pid for a in vm.tasks() if a.task == vm.me}
    assert own_pids == {os.getpid()}, own_pids
    rows = {row.task: row for row in vm.tasks()}
    assert set(workers) <= set(rows) and all(rows[w].parent == vm.me for w in workers)
    on_h2 = {row.task for row in vm.tasks("h2")}
    assert on_h2 == {w for w in workers if rows[w].host == "h2"} and workers[2] in on_h2
    assert vm.task(workers[0].tid) == workers[0] and str(workers[0]) == f"t{workers[0].tid:x}"
    assert vm.host == "h1" and vm.parent is None
    raises(pvm.NoHostError, vm.tasks, "h9")
    raises(TypeError, vm.task, "t40001")


def check_mailbox(vm):
    box = vm.mailbox
    assert box.put("colour", b"blue") == 0
    code = (
        "import sempa_pvm as p\nvm = p.Vm.enroll()\n"
        "try: vm.mailbox.put('colour', b'red')\n"
        "except p.PvmError as e: vm.parent.send_object(3, e)"
    )
    (other,) = vm.spawn(pvm.python(".")[0], ["-c", code])
    error = other.recv(3, WAIT).object()
    assert type(error) is pvm.DeniedError and "belongs to" in str(error), repr(error)
    assert bytes(box.take("colour")) == b"blue"
    assert box.put("colour", b"green") == 0 and bytes(box.take("colour")) == b"green"
    (entry,) = box.list("colour")
    assert (entry.name, entry.index, entry.owner) == ("colour", 0, vm.me), entry
    box.delete("colour")
    raises(pvm.NotFoundError, box.take, "colour")
    assert [box.put("many", pvm.Packer().pack_int(i), multi_instance=True) for i in (5, 6)] == [0, 1]
    assert box.take("many", 1, remove=True).unpacker().unpack_int() == 6
    assert len(box.list()) == 1
    # A wait for an entry lets other threads run.
    taken = []
    waiter = threading.Thread(target=lambda: taken.append(bytes(box.take("late", wait=True))))
    waiter.start()
    box.put("late", b"here")
    waiter.join(WAIT)
    assert taken == [b"here"], taken
    for name in ("late", "many"):
        box.delete(name)


def check_spawn_errors(vm):
    error = raises(pvm.SpawnError, vm.spawn, "no_such_program", count=2)
    assert error.name == "PvmNoFile" and error.codes == [-7, -7] and error.tasks == [], error
    assert "2 of 2 tasks of 'no_such_program' were not started" in str(error), error
    raises(pvm.PvmError, vm.spawn, "true", host="h9")
    raises(ValueError, vm.spawn, "true", host="h1", arch="LINUX64")
    code = "import os, sys, sempa_pvm as p; " \
           "v = p.Vm.enroll(); v.parent.send_object(3, (sys.argv[1:], os.environ['COLOUR'], os.getcwd()))"
    program, _ = pvm.python(".")
    (task,) = vm.spawn(program, ["-c", code, "a b", "c"], env={"COLOUR": "blue"}, directory="/usr")
    assert task.recv(3, WAIT).object() == (["a b", "c"], "blue", "/usr")


def check_waits(vm):
    assert vm.probe() is None
    raises(TimeoutError, vm.recv, timeout=0)
    raises(TimeoutError, vm.recv, tag=5, timeout=0.05)
    raises(ValueError, vm.recv, timeout=float("nan"))
    vm.me.send(5, b"four")
    vm.me.send(6, b"sixsix")
    info = vm.probe(tag=6)
    assert (info.sender, info.tag, info.size) == (vm.me, 6, 6), info
    assert vm.try_recv(tag=7) is None
    assert bytes(vm.recv(tag=6)) == b"sixsix" and bytes(vm.recv(vm.me, timeout=1)) == b"four"
    # A thread that waits does not stop the others.
    received = []
    waiter = threading.Thread(target=lambda: received.append(bytes(vm.recv(tag=8))))
    waiter.start()
    vm.me.send(8, b"for the thread")
    waiter.join(WAIT)
    assert received == [b"for the thread"]


def check_fork(vm):
    """A child that was forked from a task is not a task."""
    child = os.fork()
    if child == 0:
        errors = [
            raises(pvm.NotEnrolledError, call)
            for call in (vm.recv, vm.config, lambda: vm.me.send(1, b"x"), vm.try_recv)
        ]
        os._exit(0 if all("forked" in str(error) for error in errors) else 1)
    assert os.waitpid(child, 0)[1] == 0


def check_signals_and_notices(vm, workers):
    first, second, third = workers
    notices = vm.watch_tasks(workers)
    assert notices.try_get() is None and not notices.is_exhausted
    raises(TimeoutError, notices.get, 0.05)
    assert first.is_running()
    first.suspend()
    deadline = time.monotonic() + WAIT
    while not {row.task: row for row in vm.tasks()}[first].is_suspended:
        assert time.monotonic() < deadline
    first.resume()
    first.kill()
    assert next(notices) == pvm.TaskEnded(first)
    assert not first.is_running()
    second.signal(signal.SIGKILL)
    third.send(TAG_WORK)
    ended = {notice.task for notice in notices}
    assert ended == {second, third} and notices.is_exhausted and notices.get() is None
    with vm.watch_tasks([first]) as late:
        assert late.get(WAIT) == pvm.TaskEnded(first), "a task that has ended is reported at once"
    with vm.watch_tasks([vm.me]) as unused:
        assert unused.try_get() is None
    assert unused.is_exhausted and unused.get() is None
    raises(pvm.PvmError, vm.watch_tasks, [7])
    raises(pvm.NoHostError, vm.watch_hosts, ["h9"])


def check_events(vm):
    log = vm.events()
    assert log[0].number >= 1 and all(a.number < b.number for a, b in zip(log, log[1:]))
    assert any(event.kind == "HostAdded" and event.details["name"] == "h2" for event in log)
    assert vm.events(limit=2) == log[:2] and vm.events(first=log[1].number, limit=1) == [log[1]]
    stream = vm.watch_events(first=log[2].number)
    error = raises(pvm.PvmError, vm.watch_events)
    assert error.name == "PvmAlready", error
    assert next(stream) == log[2]
    (task,) = vm.spawn("/bin/true")
    for event in stream:
        assert event.number > log[2].number
        if event.kind == "TaskEnded" and event.details["tid"] == task.tid:
            break
    assert str(task) in event.text and abs(event.time - time.time()) < 3600, event
    stream.close()
    assert stream.is_exhausted and list(stream) == []
    with vm.watch_events() as stream:
        (task,) = vm.spawn("/bin/true")
        while (event := stream.get(WAIT)).details.get("tid") != task.tid:
            pass
        assert event.kind == "TaskStarted" and event.number > log[-1].number, event


def check_hosts(vm):
    joined, left = vm.watch_new_hosts(), vm.watch_hosts(["h2"])
    assert vm.delete_hosts(["h2", "h9"])[0] is None
    (notice,) = left
    assert isinstance(notice, pvm.HostRemoved), notice
    (added,) = vm.add_hosts(["h2"])
    assert added.error is None and added.host.name == "h2", added
    assert joined.get(WAIT) == pvm.HostJoined(added.host.tid)
    (failed,) = vm.add_hosts(["h2"])
    assert failed.host is None and failed.error.name == "PvmDupHost", failed
    joined.close()


def main(vm):
    if vm.parent is not None:
        return worker(vm)
    program = pvm.python(__file__)
    workers = vm.spawn(*program, count=2, host="h1") + vm.spawn(*program, host="h2")
    check_group(vm, workers)
    check_tables(vm, workers)
    check_mailbox(vm)
    check_waits(vm)
    check_fork(vm)
    check_signals_and_notices(vm, workers)
    check_spawn_errors(vm)
    check_events(vm)
    check_hosts(vm)
    print("services are right")
    return 0


if __name__ == "__main__":
    pvm.run(main)
