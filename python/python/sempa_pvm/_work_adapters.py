"""Drivers and workers as the native part calls them: with payloads in place of objects."""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Coroutine, Generator
from typing import TYPE_CHECKING, Any, NoReturn

from ._work_payload import dump, dump_failure, load, load_failure
from ._work_types import (
    Attempt,
    Context,
    Driver,
    Interrupt,
    PoolEvent,
    ResultInfo,
    Run,
    Worker,
    group_bits,
    task_parts,
)
from .errors import WorkError

if TYPE_CHECKING:
    from ._native import WorkContext, WorkRun

FAILURES_MAX = 1000
"""Tasks whose tracebacks a driver keeps; those of the task that failed first are forgotten."""
WINDOW = 2048
"""Open tasks of an iterator that is read as needed. Each closed task makes room for one."""

_END = object()
Call = Callable[..., Any]


def call_directly(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a callback in the master's thread."""
    return function(*arguments)


def call_in_loop(loop: asyncio.AbstractEventLoop) -> Call:
    """Returns a function that calls callbacks in the thread of an event loop."""

    async def invoke(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        result = function(*arguments)
        return await result if inspect.isawaitable(result) else result

    def call(function: Callable[..., Any], *arguments: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(invoke(function, arguments), loop).result()

    return call


class TaskSource:
    """Tasks that are read as needed, from an iterator or an asynchronous iterator."""

    def __init__(self, tasks: Any, call: Call) -> None:
        self._call = call
        if hasattr(tasks, "__aiter__"):
            iterator = call(aiter, tasks)
            self._read: Callable[[], Any] = lambda: call(anext, iterator, _END)
        else:
            iterator = call(iter, tasks)
            self._read = lambda: call(next, iterator, _END)
        self.taken = 0
        self.is_exhausted = False

    def take(self, count: int) -> list[Any]:
        """Returns up to ``count`` tasks."""
        tasks: list[Any] = []
        while len(tasks) < count and not self.is_exhausted:
            task = self._read()
            if task is _END:
                self.is_exhausted = True
            else:
                tasks.append(task)
        self.taken += len(tasks)
        return tasks


class DriverAdapter:
    """A driver as the native part calls it."""

    def __init__(
        self,
        driver: Driver,
        *,
        call: Call = call_directly,
        source_call: Call = call_directly,
        grain: tuple[float, float] | None = None,
        interrupt: Interrupt | None = None,
    ) -> None:
        self._driver = driver
        self._call = call
        self._source_call = source_call
        self._grain = grain
        self.is_stopping = False
        """True: the run ends with the next callback."""
        self._interrupt = interrupt or Interrupt()
        self._run: Run | None = None
        self._source: TaskSource | None = None
        self._failures: dict[int, dict[int, str]] = {}

    def _run_of(self, native: WorkRun) -> Run:
        if self._run is None:
            self._run = Run(native)
        return self._run

    def _replace_closed_task(self, run: WorkRun) -> None:
        # One task for each closed one: a restart repeats the callback with the same tasks.
        if self.is_stopping:
            run.stop()
        elif self._source is not None and not self._source.is_exhausted:
            run.add([task_parts(task) for task in self._source.take(1)], False)

    def start(self, native: WorkRun) -> None:
        run = self._run_of(native)
        tasks = self._call(self._driver.initial_tasks, run)
        if not isinstance(tasks, list | tuple):
            self._source = TaskSource(tasks, self._source_call)
            tasks = self._source.take(WINDOW)
        run.add(tasks)

    def configure(self, native: WorkRun) -> None:
        run = self._run_of(native)
        if self._grain is not None:
            run.set_grain(*self._grain)
        self._call(self._driver.configure, run)

    def save(self) -> bytes:
        source = self._source
        taken = None if source is None or source.is_exhausted else source.taken
        return dump((taken, self._call(self._driver.save)))

    def restore(self, data: bytes) -> None:
        taken, state = load(data)
        self._call(self._driver.restore, state)
        if taken is None:
            return
        tasks = self._call(self._driver.initial_tasks, _RestartedRun())
        self._source = TaskSource(tasks, self._source_call)
        if len(self._source.take(taken)) < taken:
            raise WorkError(
                f"the run was not continued: the driver's iterator of tasks has fewer than the "
                f"{taken} tasks that an earlier master took; nothing was lost",
                "start",
            )

    def init_data(self) -> bytes:
        return dump(self._call(self._driver.init_data))

    def benchmark(self) -> bytes | None:
        task = self._call(self._driver.benchmark)
        return None if task is None else dump(task)

    def on_result(
        self,
        native: WorkRun,
        facts: tuple[int, int, int, int],
        task: bytes | memoryview,
        result: bytes | memoryview,
    ) -> None:
        run = self._run_of(native)
        task_id, worker, cpu_us, wall_us = facts
        self._failures.pop(task_id, None)
        run.info = ResultInfo(task_id, worker, cpu_us / 1e6, wall_us / 1e6)
        self._call(self._driver.on_result, run, load(task), load(result))
        run.info = None
        self._replace_closed_task(native)

    def on_partial(
        self,
        native: WorkRun,
        task_id: int,
        task: bytes | memoryview,
        data: bytes | memoryview,
    ) -> None:
        failure = load_failure(data)
        if failure is None:
            self._call(self._driver.on_partial, self._run_of(native), load(task), load(data))
            return
        if self._interrupt.exception is not None:
            raise self._interrupt.exception
        while len(self._failures) >= FAILURES_MAX and task_id not in self._failures:
            del self._failures[next(iter(self._failures))]
        attempt, text = failure
        self._failures.setdefault(task_id, {})[attempt] = text

    def on_quarantined(
        self,
        native: WorkRun,
        task_id: int,
        task: bytes | memoryview,
        facts: list[tuple[int, int, str, str, float, bool]],
    ) -> None:
        texts = self._failures.pop(task_id, {})
        attempts = [Attempt(*fact, texts.get(fact[0])) for fact in facts]
        self._call(self._driver.on_quarantined, self._run_of(native), load(task), attempts)
        self._replace_closed_task(native)

    def on_pool_event(
        self, native: WorkRun, facts: tuple[str, str | None, int | None, str | None]
    ) -> None:
        self._call(self._driver.on_pool_event, self._run_of(native), PoolEvent(*facts))

    def on_all_closed(self, native: WorkRun) -> None:
        self._call(self._driver.on_all_closed, self._run_of(native))
        if self._source is not None and not self._source.is_exhausted:
            native.add([task_parts(task) for task in self._source.take(WINDOW)], False)


class _RestartedRun(Run):
    """Takes the place of the run while a restart reads the driver's iterator again."""

    def __init__(self) -> None:
        self.info = None

    def __getattr__(self, name: str) -> NoReturn:
        raise WorkError(
            "the run was not continued: initial_tasks returns an iterator and uses the run, which "
            "a restart cannot repeat; use the run in configure",
            "start",
        )


WorkFunction = Callable[..., Any]


def worker_of(worker: Worker | type[Worker] | WorkFunction) -> Worker:
    """Returns the worker: an object, an object of a class, or a function as a worker."""
    if isinstance(worker, type) and issubclass(worker, Worker):
        return worker()
    return worker if isinstance(worker, Worker) else FunctionWorker(worker)


class FunctionWorker(Worker):
    """A function as a worker. A parameter with the name ``context`` gets the context."""

    def __init__(self, function: WorkFunction) -> None:
        if not callable(function):
            raise TypeError(f"a worker is a function or a Worker, not {type(function).__name__}")
        self._function = function
        try:
            parameters = inspect.signature(function).parameters
        except ValueError:
            # Some functions in C have no signature.
            parameters = inspect.signature(lambda task: task).parameters
        self._takes_context = "context" in parameters

    def execute(self, task: Any, context: Context) -> Any:
        if self._takes_context:
            return self._function(task, context=context)
        return self._function(task)


class WorkerAdapter:
    """A worker as the native part calls it."""

    def __init__(self, worker: Worker, interrupt: Interrupt | None = None) -> None:
        self._worker = worker
        self._context = Context()
        # None in a process of its own.
        self._interrupt = interrupt
        self._runner: asyncio.Runner | None = None

    @property
    def groups(self) -> int:
        """The groups of the worker as bits."""
        return group_bits(self._worker.groups)

    def init(self, data: bytes | memoryview) -> None:
        self._context.init_data = load(data)
        self._worker.init(self._context.init_data)

    def execute(self, payload: bytes | memoryview, native: WorkContext) -> bytes:
        context = self._context
        context._native = native
        try:
            result = self._worker.execute(load(payload), context)
            if isinstance(result, Generator):
                result = self._send_parts(result, context)
            elif inspect.iscoroutine(result):
                result = self._run(result)
            return dump(result)
        except Exception:
            native.send_partial(dump_failure(native.attempt, traceback.format_exc()))
            raise
        except BaseException as exception:
            self._end(exception, native)
            raise
        finally:
            context._native = None

    def _send_parts(self, parts: Generator[Any, None, Any], context: Context) -> Any:
        while True:
            try:
                part = next(parts)
            except StopIteration as end:
                return end.value
            context.send_partial(part)

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(coroutine)

    def _end(self, exception: BaseException, native: WorkContext) -> None:
        """Ends the worker's process, or the run in one process."""
        if self._interrupt is None:
            end_process(exception)
        self._interrupt.exception = exception
        native.send_partial(dump_failure(native.attempt, ""))


def end_process(exception: BaseException | None = None) -> NoReturn:
    """Ends the process of a worker, without the code that follows in the script."""
    status: object = 0
    if isinstance(exception, SystemExit):
        status = exception.code
        if isinstance(status, str):
            print(status, file=sys.stderr)
    elif exception is not None:
        traceback.print_exception(exception)
        status = 1
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            # The reader is gone or the stream is closed: the text cannot be kept.
            continue
    os._exit(status if isinstance(status, int) else int(status is not None))
