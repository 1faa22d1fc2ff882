"""Checks sempa_pvm.broker: a foreman, and workers that leave, are killed, or stay to the end."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile

import sempa_pvm as pvm
from sempa_pvm import broker

SESSION = "py-squares"
READY = 1
TASK = 2
RESULT = 3
TASKS = 30
WAIT = 60


def announce(member):
    answer = member.send(broker.FOREMAN, READY, timeout=WAIT)
    assert answer.result is broker.Result.TAKEN, answer


def answer_task(member, mail):
    number = int(bytes(mail.data))
    answer = member.send(broker.FOREMAN, RESULT, f"{number} {number * number}".encode())
    assert answer, answer


def worker(life):
    with broker.join(SESSION) as member:
        announce(member)
        for done in range(TASKS):
            mail = member.recv(kind=TASK, timeout=WAIT)
            if done == 2 and life == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            answer_task(member, mail)
            if done == 2 and life == "leave":
                return 0
    raise AssertionError("the session did not end")


async def async_worker():
    with broker.join(SESSION) as member:
        announce(member)
        never = asyncio.create_task(member.arecv(kind=9999))
        await asyncio.sleep(0)
        never.cancel()
        while True:
            answer_task(member, await member.arecv(kind=TASK))


def dispatch(member, number, worker):
    """Sends a task. Returns False if the worker is gone."""
    answer = member.send(worker, TASK, str(number).encode(), returns=True)
    assert answer.result in (broker.Result.TAKEN, broker.Result.GONE), answer
    return bool(answer)


def serve(member):
    """Returns the results, and the reasons of members that are gone."""
    todo = list(range(TASKS))
    running: dict[int, int] = {}
    idle: list[int] = []
    results: dict[int, int] = {}
    gone: dict[int, str] = {}
    while len(results) < TASKS or len(gone) < 2:
        while todo and idle:
            number, receiver = todo.pop(), idle.pop()
            if dispatch(member, number, receiver):
                running[receiver] = number
            else:
                todo.append(number)
        mail = member.recv(timeout=WAIT)
        match mail:
            case broker.Gone():
                gone[mail.member] = mail.reason
                idle = [receiver for receiver in idle if receiver != mail.member]
                if mail.member in running:
                    todo.append(running.pop(mail.member))
            case broker.Returned():
                assert mail.kind == TASK and mail.reason, mail
            case broker.Message() if mail.kind == RESULT:
                number, square = (int(text) for text in bytes(mail.data).split())
                results[number] = square
                running.pop(mail.sender, None)
                idle.append(mail.sender)
            case broker.Message():
                idle.append(mail.sender)
    return results, gone


def check_answers(member, gone):
    for number, reason in gone.items():
        answer = member.send(number, TASK, b"0")
        assert answer.result is broker.Result.GONE and answer.reason == reason, answer
    answer = member.send(12345, TASK, b"0")
    assert answer.result is broker.Result.UNKNOWN and not answer, answer
    answer = member.send(member.id, TASK, bytes(17 << 20))
    assert answer.result is broker.Result.FULL and answer.limit == "message-bytes", answer
    for wrong in ("text", 7):
        try:
            member.send(member.id, TASK, wrong)
        except TypeError:
            pass
        else:
            raise AssertionError("no error")


def check_probes(member):
    assert member.iprobe(kind=77) is None and member.try_recv(kind=77) is None
    try:
        member.recv(kind=77, timeout=0.01)
    except TimeoutError:
        pass
    else:
        raise AssertionError("no timeout")
    assert member.send(member.id, 77, memoryview(b"myself"))
    info = member.probe(source=member.id, kind=77, timeout=WAIT)
    assert info == broker.MailInfo(member.id, 77, 6), info
    assert member.iprobe(member.id) == info
    mail = member.recv(member.id)
    assert bytes(mail.data) == b"myself" and mail.sender == member.id, mail


def check_report(member, gone):
    report = member.report()
    states = {info.id: info for info in report.members}
    assert states[member.id].is_foreman and states[member.id].state == "present", states
    for number, reason in gone.items():
        assert states[number].state == "gone" and states[number].reason, states
    assert report.session == SESSION and report.counts["joins"] == 4, report
    assert states[member.id].tid is not None, states


def check_member_outside(member):
    """A member outside the virtual machine dials the broker, with a session file."""
    program = os.path.expanduser("~/pvm3/bin/LINUX64/pvm-broker")
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "session")
        command = [program, "secret", SESSION, "--output", file]
        subprocess.run(command, check=True, stdout=subprocess.PIPE)
        with broker.join(session_file=file) as outside:
            assert outside.session == SESSION and outside.incarnation == 1, outside
            assert outside.send(member.id, 5, b"from outside")
            mail = member.recv(outside.id, kind=5, timeout=WAIT)
            assert bytes(mail.data) == b"from outside", mail
            assert member.send(outside.id, 6, returns=True)
            mail = outside.recv(member.id, timeout=WAIT)
            assert mail == broker.Message(member.id, 6, memoryview(b"")), mail
    notice = member.recv(outside.id, broker.GONE, timeout=WAIT)
    assert notice == broker.Gone(outside.id, "left", 0), notice
    try:
        outside.send(broker.FOREMAN, 1)
    except broker.BrokerError as error:
        assert error.kind == "gone" and "has left" in str(error), error
    else:
        raise AssertionError("no error")
    open_file = os.path.join(os.path.dirname(__file__), "no such file")
    try:
        broker.join(session_file=open_file)
    except broker.BrokerError as error:
        assert error.kind == "session file", error
    else:
        raise AssertionError("no error")


def foreman(vm):
    lives = ["leave", "kill", "async"]
    with broker.join(SESSION, foreman=True, vm=vm) as member:
        assert member.watch().result is broker.Result.DONE
        for life in lives:
            vm.spawn(*pvm.python(__file__, life))
        results, gone = serve(member)
        assert results == {number: number * number for number in range(TASKS)}, results
        assert sorted(gone.values()) == ["killed", "left"], gone
        check_answers(member, gone)
        check_probes(member)
        check_report(member, gone)
        check_member_outside(member)
        assert member.over is None
        assert member.finish(), "the foreman may end the session"
    try:
        broker.join(SESSION)
    except broker.SessionOverError as error:
        assert error.exit_status == broker.EXIT_OVER == 79, error
    else:
        raise AssertionError("no error")
    print("the session is right")
    return 0


def main():
    match sys.argv[1:]:
        case []:
            with pvm.Vm.enroll() as vm:
                return foreman(vm)
        case ["async"]:
            asyncio.run(async_worker())
        case [life]:
            return worker(life)


if __name__ == "__main__":
    broker.run(main)
