"""Master-worker programs: functions that workers on many hosts execute.

A script calls :func:`map`; the framework starts the same script on other hosts, where the same call
executes the tasks::

    from sempa_pvm import work

    def square(number):
        return number * number

    for number, result in work.map(square, range(1000), workers=4):
        print(number, result)

:func:`run` is for drivers that add tasks as results arrive. With ``SEMPA_WORK_IN_PROCESS=1`` in the
environment, a program needs no virtual machine. The documentation is in ``docs/PYTHON.md`` of Sempa.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import threading
from collections import deque
from collections.abc import AsyncIterable, Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Generic, Literal, NoReturn, Self, TypedDict, TypeVar, Unpack

from ._native import (
    Vm,
    work_in_process,
    work_master,
    work_run_of_worker,
    work_serve,
    work_stop,
)
from ._work_adapters import (
    Call,
    DriverAdapter,
    WorkerAdapter,
    WorkFunction,
    call_directly,
    call_in_loop,
    end_process,
    worker_of,
)
from ._work_start import default_name, export_environment, is_in_process, options_json
from ._work_types import (
    Attempt,
    Context,
    Driver,
    Interrupt,
    OpenTask,
    Outcome,
    PoolEvent,
    ResultInfo,
    Retry,
    Run,
    Task,
    TaskFailed,
    Worker,
    outcome_of,
)
from .errors import PvmError, WorkError

__all__ = [
    "AnyWorker",
    "AsyncResults",
    "Attempt",
    "Context",
    "Driver",
    "OpenTask",
    "Options",
    "Outcome",
    "PoolEvent",
    "ResultInfo",
    "Results",
    "Retry",
    "Run",
    "Task",
    "TaskFailed",
    "WorkError",
    "Worker",
    "amap",
    "arun",
    "is_worker",
    "map",
    "run",
    "serve",
]

T = TypeVar("T")
R = TypeVar("R")
AnyWorker = Worker | type[Worker] | WorkFunction

RESULTS_MAX = 4096
"""Results that wait for the program; the master waits while there are as many."""


class Options(TypedDict, total=False):
    """Options of :func:`map`, :func:`run`, :func:`amap` and :func:`arun`."""

    name: str
    """Name of the run, by default that of the script. ``pvm work status NAME`` finds the run."""
    workers: int
    """Number of workers; 4 by default."""
    journal: str | os.PathLike[str] | None
    """Directory of the journal. Without one, a run whose master is killed is lost."""
    look_ahead: float
    """Seconds that the tasks which a worker holds should last; 0 for one task at a time."""
    retry: Retry
    grain: tuple[float, float]
    """Least and greatest time limit of a task in seconds (:meth:`Context.is_time_over`)."""
    attempt_timeout: float
    """Seconds after which an attempt counts as failed."""
    progress: float
    """Seconds between two lines about the progress on standard error."""
    master_wait: float
    """Seconds for which workers wait for the next master of a run with a journal; 600 by default."""
    host: str
    """The only host on which workers start."""
    arch: str
    """The only architecture on which workers start."""
    settings: dict[str, Any]
    """Other settings of the crate ``master-worker``, by name; times in microseconds."""
    in_process: bool
    """True: all tasks are executed in this process. By default SEMPA_WORK_IN_PROCESS decides."""
    vm: Vm
    """This process as a task, if the program has enrolled already."""


def is_worker() -> bool:
    """True if a master has started this process as a worker."""
    return work_run_of_worker() is not None


def _serve_and_exit(worker: AnyWorker, vm: Vm | None) -> NoReturn:
    """Executes tasks until the run releases this worker, and ends the process."""

    def serve_tasks() -> NoReturn:
        try:
            own_vm = Vm.enroll() if vm is None else vm
            adapter = WorkerAdapter(worker_of(worker))
            work_serve(own_vm, adapter, adapter.groups)
            own_vm.exit()
        except BaseException as exception:
            end_process(exception)
        end_process()

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        serve_tasks()
    # A worker that is a coroutine needs a thread without a running loop.
    thread = threading.Thread(target=serve_tasks)
    thread.start()
    thread.join()
    end_process()


def serve(worker: AnyWorker | Mapping[str, AnyWorker], *, vm: Vm | None = None) -> NoReturn:
    """Executes tasks until the run releases this worker, and ends the process.

    A script with several runs begins with::

        if work.is_worker():
            work.serve({"first": function, "second": other_function})
    """
    if isinstance(worker, Mapping):
        name = work_run_of_worker()
        if name is None or name not in worker:
            raise WorkError(
                f"no task was executed: the worker belongs to the run {name}, and serve has only "
                f"workers of {', '.join(worker)}",
                "worker",
            )
        worker = worker[name]
    _serve_and_exit(worker, vm)


class _Execution:
    """A run that is carried out in this process."""

    def __init__(
        self,
        driver: Driver,
        worker: AnyWorker,
        options: Options,
        *,
        call: Call = call_directly,
        source_call: Call | None = None,
    ) -> None:
        self.in_process = is_in_process(options.get("in_process"))
        name = options.get("name") or default_name()
        run_of_worker = work_run_of_worker()
        if run_of_worker is not None and not self.in_process:
            if run_of_worker != name:
                raise WorkError(
                    f"no task was executed: this process is a worker of the run {run_of_worker}, "
                    f"and the script began the run {name}. Begin the script with work.serve, which "
                    "takes a worker for each run",
                    "worker",
                )
            _serve_and_exit(worker, options.get("vm"))
        self._options = options_json(
            name=name,
            workers=options.get("workers", 4),
            journal=options.get("journal"),
            look_ahead=options.get("look_ahead"),
            retry=options.get("retry"),
            attempt_timeout=options.get("attempt_timeout"),
            progress=options.get("progress"),
            master_wait=options.get("master_wait", 600.0),
            host=options.get("host"),
            arch=options.get("arch"),
            settings=options.get("settings"),
            in_process=self.in_process,
        )
        interrupt = Interrupt()
        self._driver = DriverAdapter(
            driver,
            call=call,
            source_call=source_call or call,
            grain=options.get("grain"),
            interrupt=interrupt,
        )
        self._worker = WorkerAdapter(worker_of(worker), interrupt) if self.in_process else None
        self._vm: Vm | None = None
        self._owns_vm = False
        if not self.in_process:
            self._owns_vm = options.get("vm") is None
            self._vm = options.get("vm") or Vm.enroll()
            export_environment()
        self._thread: threading.Thread | None = None
        self._outcome: Outcome | None = None
        self._exception: BaseException | None = None

    def run(self) -> Outcome:
        """Carries out the run in the calling thread."""
        if self._vm is None:
            return outcome_of(work_in_process(self._driver, self._worker, self._options))
        try:
            return outcome_of(work_master(self._vm, self._driver, self._options))
        finally:
            if self._owns_vm:
                self._vm.exit()

    def start(self, on_end: Callable[[], object]) -> None:
        """Carries out the run in a thread of its own. Calls ``on_end`` in that thread."""

        def carry_out() -> None:
            try:
                self._outcome = self.run()
            except BaseException as exception:
                self._exception = exception
            finally:
                on_end()

        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(carry_out,), daemon=True)
        self._thread.name = "sempa-work-master"
        self._thread.start()

    def join(self) -> None:
        """Waits for the end of the thread."""
        if self._thread is not None:
            self._thread.join()

    def stop(self) -> None:
        """Requests the end of the run."""
        self._driver.is_stopping = True
        if self._vm is not None and self._thread is not None and self._thread.is_alive():
            # An error means that the master has left the virtual machine, or has lost it.
            with contextlib.suppress(PvmError):
                work_stop(self._vm)

    def outcome(self) -> Outcome:
        """Returns the outcome after the end of the thread, or raises what has ended the run."""
        if self._exception is not None:
            raise self._exception
        assert self._outcome is not None
        return self._outcome


class _TaskDriver(Driver):
    """A driver that only collects results."""

    def __init__(self, tasks: Any, on_result: Callable[[Any, Any], object]) -> None:
        self._tasks = tasks
        self._on_result = on_result

    def initial_tasks(self, run: Run) -> Any:
        return self._tasks

    def on_result(self, run: Run, task: Any, result: Any) -> Any:
        return self._on_result(task, result)


def _driver_of(driver: Any, on_result: Callable[[Any, Any], object] | None) -> Driver:
    if isinstance(driver, Driver):
        if on_result is not None:
            raise TypeError("a Driver has its own on_result")
        return driver
    if on_result is None:
        raise TypeError("tasks without a Driver need on_result, which takes task and result")
    return _TaskDriver(driver() if callable(driver) else driver, on_result)


def _check_journal(driver: Driver, options: Options) -> None:
    if isinstance(driver, _TaskDriver) and options.get("journal") is not None:
        raise TypeError("a run with a journal needs a Driver, whose attributes are saved")


def run(
    driver: Driver | Iterable[Any] | Callable[[], Iterable[Any]],
    worker: AnyWorker,
    *,
    on_result: Callable[[Any, Any], object] | None = None,
    **options: Unpack[Options],
) -> Outcome:
    """Carries out a run and returns its outcome. In a worker, executes tasks and does not return.

    ``driver`` is a :class:`Driver`, or tasks (also a generator of tasks) whose results
    ``on_result`` takes. A thread of its own calls the driver; with ``in_process``, the calling
    thread does.
    """
    the_driver = _driver_of(driver, on_result)
    _check_journal(the_driver, options)
    execution = _Execution(the_driver, worker, options)
    if execution.in_process:
        return execution.run()
    execution.start(lambda: None)
    try:
        execution.join()
    except BaseException:
        execution.stop()
        execution.join()
        raise
    return execution.outcome()


async def arun(
    driver: Driver | AsyncIterable[Any] | Iterable[Any] | Callable[[], Any],
    worker: AnyWorker,
    *,
    on_result: Callable[[Any, Any], object] | None = None,
    **options: Unpack[Options],
) -> Outcome:
    """As :func:`run`. The loop's thread calls the driver, whose methods may be coroutines."""
    loop = asyncio.get_running_loop()
    the_driver = _driver_of(driver, on_result)
    _check_journal(the_driver, options)
    execution = _Execution(the_driver, worker, options, call=call_in_loop(loop))
    ended = asyncio.Event()
    execution.start(lambda: loop.call_soon_threadsafe(ended.set))
    try:
        await ended.wait()
    except BaseException:
        execution.stop()
        # The master may wait for a callback, which the loop must execute.
        await ended.wait()
        raise
    execution.join()
    return execution.outcome()


class _Part:
    """A partial result on its way to the program."""

    def __init__(self, task: Any, value: Any) -> None:
        self.task = task
        self.value = value


class _ResultStream:
    """Results on their way from the master's thread to the program."""

    def __init__(self, notify: Callable[[], object] | None = None) -> None:
        self._items: deque[Any] = deque()
        self._changed = threading.Condition()
        self._notify = notify
        self.is_ended = False
        self._is_closed = False

    def put(self, item: Any) -> None:
        """Adds an item; waits while there are too many."""
        with self._changed:
            while len(self._items) >= RESULTS_MAX and not self._is_closed:
                self._changed.wait()
            if self._is_closed:
                return
            self._items.append(item)
            self._changed.notify()
        if self._notify is not None:
            self._notify()

    def end(self) -> None:
        """Marks the end of the run."""
        with self._changed:
            self.is_ended = True
            self._changed.notify()
        if self._notify is not None:
            self._notify()

    def close(self) -> None:
        """Drops all items, also those that come later."""
        with self._changed:
            self._is_closed = True
            self._items.clear()
            self._changed.notify()

    def take(self, *, waits: bool) -> Any:
        """Returns the next item in a tuple; an empty one if there is none."""
        with self._changed:
            while waits and not self._items and not self.is_ended:
                self._changed.wait()
            if not self._items:
                return ()
            item = self._items.popleft()
            self._changed.notify()
            return (item,)


class _MapDriver(Driver):
    """The driver of :func:`map`. With a journal, all results are part of the saved state."""

    def __init__(
        self, tasks: Any, stream: _ResultStream, init_data: object, stops: bool, keeps: bool
    ) -> None:
        self._tasks = tasks
        self._stream = stream
        self._init_data = init_data
        self._stops = stops
        self._keeps = keeps
        self._results: list[tuple[Any, Any]] = []

    def initial_tasks(self, run: Run) -> Any:
        return self._tasks

    def init_data(self) -> Any:
        return self._init_data

    def _deliver(self, task: Any, result: Any) -> None:
        if self._keeps:
            self._results.append((task, result))
        self._stream.put((task, result))

    def on_result(self, run: Run, task: Any, result: Any) -> None:
        self._deliver(task, result)

    def on_partial(self, run: Run, task: Any, part: Any) -> None:
        self._stream.put(_Part(task, part))

    def on_quarantined(self, run: Run, task: Any, attempts: list[Attempt]) -> None:
        self._deliver(task, TaskFailed(task, attempts))
        if self._stops:
            run.stop()

    def save(self) -> Any:
        return self._results

    def restore(self, state: Any) -> None:
        for task, result in state:
            self._deliver(task, result)


class _Mapping(Generic[T, R]):
    """What :class:`Results` and :class:`AsyncResults` share."""

    def __init__(
        self,
        function: AnyWorker,
        tasks: Any,
        stream: _ResultStream,
        *,
        init_data: object,
        on_partial: Callable[[T, Any], object] | None,
        errors: Literal["raise", "yield"],
        options: Options,
        source_call: Call | None = None,
    ) -> None:
        if errors not in ("raise", "yield"):
            raise ValueError(f"errors is {errors!r}; it must be 'raise' or 'yield'")
        self._stream = stream
        self._on_partial = on_partial
        self._raises = errors == "raise"
        keeps = options.get("journal") is not None
        driver = _MapDriver(tasks, stream, init_data, self._raises, keeps)
        self._execution = _Execution(driver, function, options, source_call=source_call)
        self._outcome: Outcome | None = None
        self._is_closed = False
        self._execution.start(stream.end)

    @property
    def outcome(self) -> Outcome:
        """The outcome of the run, after the last result."""
        if self._outcome is None:
            raise WorkError("the run has not ended: read all results first", "call")
        return self._outcome

    def _accept(self, item: Any) -> tuple[T, R] | None:
        """Returns the pair of task and result; None for a partial result."""
        if isinstance(item, _Part):
            if self._on_partial is not None:
                self._on_partial(item.task, item.value)
            return None
        task, result = item
        if self._raises and isinstance(result, TaskFailed):
            raise result
        return task, result

    def _finish(self) -> None:
        """Keeps the outcome after the end of the run, or raises what has ended the run."""
        self._execution.join()
        outcome = self._execution.outcome()
        self._outcome = outcome
        if not outcome.is_finished and not self._is_closed:
            raise WorkError(
                "the run was stopped before its tasks were finished; with a journal it can be "
                "continued",
                "stopped",
            )

    def _stop(self) -> None:
        self._is_closed = True
        self._stream.close()
        self._execution.stop()


class Results(_Mapping[T, R]):
    """Iterator over pairs of task and result, in the order in which results arrive.

    Use ``with`` if the loop may end early, so that the run ends at once.
    """

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[T, R]:
        if self._is_closed:
            raise StopIteration
        try:
            while item := self._stream.take(waits=True):
                pair = self._accept(item[0])
                if pair is not None:
                    return pair
            self._finish()
        except BaseException:
            self.close()
            raise
        self._is_closed = True
        raise StopIteration

    def close(self) -> None:
        """Ends the run."""
        if not self._is_closed:
            self._stop()
            self._execution.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_execution") and not self._is_closed:
            self._stop()


def map(
    function: AnyWorker,
    tasks: Iterable[T],
    *,
    init_data: object = None,
    on_partial: Callable[[T, Any], object] | None = None,
    errors: Literal["raise", "yield"] = "raise",
    **options: Unpack[Options],
) -> Results[T, Any]:
    """Executes ``function`` for each task, and returns an iterator over pairs of task and result.

    ``tasks`` is read as needed, by a thread of the run. A task that fails too often raises
    :class:`TaskFailed`; with ``errors="yield"`` this exception takes the place of its result. If
    ``function`` has a parameter ``context``, the parameter gets the :class:`Context`, which has
    ``init_data``. If ``function`` is a generator, ``on_partial`` gets what it yields.
    """
    return Results(
        function,
        iter(tasks),
        _ResultStream(),
        init_data=init_data,
        on_partial=on_partial,
        errors=errors,
        options=options,
    )


class AsyncResults(_Mapping[T, R]):
    """Asynchronous iterator over pairs of task and result."""

    def __init__(self, function: AnyWorker, tasks: Any, **arguments: Any) -> None:
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        super().__init__(
            function,
            tasks,
            _ResultStream(self._notify),
            source_call=call_in_loop(self._loop),
            **arguments,
        )

    def _notify(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._changed.set)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[T, R]:
        if self._is_closed:
            raise StopAsyncIteration
        while True:
            self._changed.clear()
            # Nothing between this call and the end of the coroutine can be cancelled.
            item = self._stream.take(waits=False)
            try:
                pair = self._accept(item[0]) if item else None
                if not item and self._stream.is_ended:
                    self._finish()
                    break
            except BaseException:
                await self.aclose()
                raise
            if pair is not None:
                return pair
            if not item:
                await self._changed.wait()
        self._is_closed = True
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Ends the run."""
        if self._is_closed:
            return
        self._stop()
        while not self._stream.is_ended:
            self._changed.clear()
            if not self._stream.is_ended:
                await self._changed.wait()
        self._execution.join()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()


def amap(
    function: AnyWorker,
    tasks: Iterable[T] | AsyncIterable[T],
    *,
    init_data: object = None,
    on_partial: Callable[[T, Any], object] | None = None,
    errors: Literal["raise", "yield"] = "raise",
    **options: Unpack[Options],
) -> AsyncResults[T, Any]:
    """As :func:`map`, for coroutines: ``async for task, result in work.amap(…)``.

    The loop's thread reads ``tasks``, which may be an asynchronous iterator.
    """
    return AsyncResults(
        function,
        tasks if hasattr(tasks, "__aiter__") else iter(tasks),
        init_data=init_data,
        on_partial=on_partial,
        errors=errors,
        options=options,
    )
