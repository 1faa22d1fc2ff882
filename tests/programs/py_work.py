"""Checks sempa_pvm.work: in one process, or on hosts with the name of the check as argument."""

import asyncio
import os
import sys
import threading

from sempa_pvm import work

FEW = work.Retry(attempts=2, delay=0, delay_max=0, host_exclusion=0)


def square(number):
    return number * number


def half(number):
    if number % 2:
        raise ValueError(f"{number} is odd")
    return number // 2


def parts(number):
    """Yields the numbers below, and returns their number."""
    for part in range(number):
        yield part
    return number


async def later(number):
    await asyncio.sleep(0)
    return number + 1


def with_data(task, context):
    return task + context.init_data["base"]


def twice(array):
    return array * 2


def check_functions():
    results = work.map(square, range(3000), workers=2, name="squares")
    assert sorted(results) == [(number, number * number) for number in range(3000)]
    outcome = results.outcome
    assert outcome.is_finished, outcome
    assert outcome.statistics["counts"]["results_accepted"] == 3000, outcome
    assert set("WTNPA") < set(outcome.statistics), outcome
    assert "3000 tasks" in outcome.text, outcome.text


def check_init_data():
    pairs = dict(work.map(with_data, range(10), init_data={"base": 100}, workers=2, name="data"))
    assert pairs == {number: number + 100 for number in range(10)}, pairs


def check_failures():
    """Exceptions in workers reach the program with their traceback."""
    pairs = dict(
        work.map(half, range(6), workers=2, retry=FEW, errors="yield", name="failures")
    )
    assert {task: pairs[task] for task in (0, 2, 4)} == {0: 0, 2: 1, 4: 2}, pairs
    failed = pairs[3]
    assert isinstance(failed, work.TaskFailed), failed
    assert failed.task == 3 and len(failed.attempts) == 2, failed
    for attempt in failed.attempts:
        text = attempt.traceback or ""
        assert "ValueError: 3 is odd" in text and "in half" in text and attempt.counts, attempt


def check_first_failure():
    try:
        list(work.map(half, [1], workers=1, retry=FEW, name="failure"))
    except work.TaskFailed as error:
        assert "ValueError: 1 is odd" in str(error), error
    else:
        raise AssertionError("no error")


def check_partial_results():
    got = []
    pairs = dict(
        work.map(parts, [3, 4], on_partial=lambda *part: got.append(part), workers=1, name="parts")
    )
    assert pairs == {3: 3, 4: 4}, pairs
    assert sorted(got) == [(n, part) for n in (3, 4) for part in range(n)], got


def check_lazy_tasks():
    """An endless generator is read only as far as the window reaches beyond the results."""
    taken: list[None] = []

    def endless():
        while True:
            taken.append(None)
            yield len(taken)

    count = 0
    with work.map(square, endless(), workers=2, name="endless") as results:
        for _ in results:
            count += 1
            if count == 50:
                break
    # The window, and the results that the program has not read.
    assert len(taken) <= 2048 + 4096 + 50, len(taken)


class Sum(work.Driver):
    """Sums the numbers of a tree; each number below 64 has two children."""

    def __init__(self):
        self.sum = 0
        self.events = []
        self.updates = 0

    def initial_tasks(self, run):
        return [work.Task(1, key=1.0)]

    def init_data(self):
        return {"factor": 2}

    def on_result(self, run, task, children):
        assert run.info.wall_time >= 0 and run.info.task_id > 0
        self.sum += task
        run.add(work.Task(child, key=float(child)) for child in children)
        run.update({"sum": self.sum})
        assert run.progress()["waiting"] >= 0

    def on_pool_event(self, run, event):
        self.events.append(event.kind)


class Children(work.Worker):
    def init(self, data):
        self.factor = data["factor"]

    def execute(self, task, context):
        assert not context.is_canceled()
        update = context.update()
        assert update is None or update["sum"] > 0
        if task >= 64:
            return []
        return [self.factor * task, self.factor * task + 1]


def check_classes():
    driver = Sum()
    outcome = work.run(driver, Children, workers=2, name="tree")
    assert outcome.is_finished and driver.sum == sum(range(1, 128)), driver.sum
    assert "WorkerReady" in driver.events, driver.events


class Refreshing(work.Driver):
    """Replaces the init data in the middle of the run, and closes the tasks that remain."""

    def __init__(self):
        self.seen = []

    def initial_tasks(self, run):
        return [work.Task(number, key=number) for number in range(20)]

    def init_data(self):
        return "first"

    def on_result(self, run, task, result):
        self.seen.append(result)
        if len(self.seen) == 1:
            run.refresh_init_data("second")
        if result == "second":
            for open_task in run.open_tasks():
                assert open_task.task == open_task.key
                assert run.cancel_task(open_task.task_id)
            assert run.stop_work(run.info.worker) is None


def init_data_of(task, context):
    return context.init_data


def check_new_init_data():
    driver = Refreshing()
    outcome = work.run(driver, init_data_of, workers=1, look_ahead=0, name="refresh")
    assert outcome.is_finished and set(driver.seen) == {"first", "second"}, driver.seen
    assert driver.seen.count("second") == 1, driver.seen


def check_generator_driver():
    total = []
    outcome = work.run(
        lambda: (number for number in range(100)),
        square,
        on_result=lambda task, result: total.append(result - task),
        workers=2,
        name="generator",
    )
    assert outcome.is_finished
    assert sum(total) == sum(n * n - n for n in range(100))


class Remaining(work.Worker):
    """Counts down until its time is over, and returns the rest as a task."""

    def execute(self, task, context):
        done = 0
        while task and not context.is_time_over():
            task -= 1
            done += 1
        if task:
            context.return_task(task)
        return done


def check_returned_tasks():
    done = []
    work.run(
        [200_000],
        Remaining(),
        on_result=lambda task, result: done.append(result),
        grain=(0.01, 0.01),
        workers=2,
        name="grain",
    )
    assert sum(done) == 200_000 and len(done) > 1, done


class Broken(Sum):
    def on_result(self, run, task, result):
        raise KeyError("the driver is wrong")


def check_driver_failure():
    try:
        work.run(Broken(), Children, workers=1, name="broken")
    except KeyError as error:
        assert error.args == ("the driver is wrong",), error
    else:
        raise AssertionError("no error")


class AsyncSum(Sum):
    """The methods are coroutines of the loop's thread."""

    async def initial_tasks(self, run):
        await asyncio.sleep(0)
        self.thread = threading.get_ident()
        return super().initial_tasks(run)

    async def on_result(self, run, task, children):
        assert threading.get_ident() == self.thread
        await asyncio.sleep(0)
        super().on_result(run, task, children)


def check_asyncio():
    async def numbers():
        for number in range(200):
            await asyncio.sleep(0)
            yield number

    async def tick(ticks):
        while True:
            ticks.append(None)
            await asyncio.sleep(0.001)

    async def main():
        ticks: list[None] = []
        ticking = asyncio.create_task(tick(ticks))
        pairs = {}
        async for task, result in work.amap(later, numbers(), workers=2, name="coroutines"):
            pairs[task] = result
        assert pairs == {number: number + 1 for number in range(200)}, pairs
        driver = AsyncSum()
        outcome = await work.arun(driver, Children, workers=2, name="async-tree")
        assert outcome.is_finished and driver.sum == sum(range(1, 128)), driver.sum
        async with work.amap(square, range(10**9), workers=1, name="early-end") as results:
            async for _ in results:
                break
        ticking.cancel()
        assert len(ticks) > 2, "the loop was blocked"

    asyncio.run(main())


def check_arrays():
    import numpy

    arrays = [numpy.arange(n, dtype="f8").reshape(2, -1) for n in (2, 1000, 200_000)]
    arrays.append(numpy.asfortranarray(arrays[1]))
    for task, result in work.map(twice, arrays, workers=2, name="arrays"):
        assert numpy.array_equal(result, task * 2)
        assert not result.flags.writeable and result.base is not None, result.flags
        assert result.ctypes.data % 16 == 0


def check_exit():
    """The exit of a worker's program counts as a failure; in one process it ends the run."""
    in_process = "SEMPA_WORK_IN_PROCESS" in os.environ
    try:
        list(work.map(sys.exit, [7], workers=1, retry=FEW, name="exit"))
    except SystemExit as error:
        assert in_process and error.code == 7, error
    except work.TaskFailed as error:
        assert not in_process and "7" in error.attempts[-1].reason, error
    else:
        raise AssertionError("no error")


CHECKS = {name: value for name, value in globals().items() if name.startswith("check_")}
RUNS: dict[str, work.AnyWorker] = {
    "squares": square,
    "data": with_data,
    "failures": half,
    "failure": half,
    "parts": parts,
    "endless": square,
    "tree": Children,
    "generator": square,
    "refresh": init_data_of,
    "grain": Remaining,
    "broken": Children,
    "coroutines": later,
    "async-tree": Children,
    "early-end": square,
    "arrays": twice,
    "exit": sys.exit,
}


if __name__ == "__main__":
    if work.is_worker():
        work.serve(RUNS)
    has_numpy = "numpy" in sys.argv[1:]
    for name, check in CHECKS.items():
        if name != "check_arrays" or has_numpy:
            check()
    print("work is right")
