"""An event loop on a virtual clock, with seeded chance.

Purpose: run the daemon's own coroutines, one turn at a time. A seed chooses among the ready
callbacks, so that races show. Work for threads runs inline, at its start, at its end or in between.
Non-purpose: files, sockets, signals, real time. Invariants: the same seed and calls give the same
turns; nothing sleeps; no callback of an ended life runs again.

A *life* is a process in the simulation: a life of the daemon, or a client. It is a context
variable, so a life's tasks start tasks of that life. `end_life` acts as SIGKILL does on a process.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import random
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

OUTSIDE = 0
"""The life of the observer: it does not end."""
LIFE: contextvars.ContextVar[int] = contextvars.ContextVar("life", default=OUTSIDE)

TURN_S = 1e-5
"""Virtual seconds that a callback takes."""
STILL_TURNS = 100_000
"""A livelock is this many turns without a timer."""


class Killed(BaseException):
    """The process ends here. Only the loop catches it."""


class Stuck(Exception):
    """No callback or timer is pending, or turns never end."""


class Pace(NamedTuple):
    """Timing of work in a thread. delay_s: until its result. moves_at: share, 0 to 1, until bytes
    move."""

    delay_s: float
    moves_at: float


class SimLoop(asyncio.BaseEventLoop):
    """See the module. rng: makes every choice. in_order: share of turns that run the oldest
    callback.
    pace: timing of work in a thread. between: called after each turn. unforeseen: uncaught
    errors."""

    def __init__(self, rng: random.Random, *, in_order: float = 0.5) -> None:
        super().__init__()
        self.rng, self.in_order = rng, in_order
        self.pace: Callable[[Callable[..., Any]], Pace] = lambda _work: Pace(1e-4, 1.0)
        self.between: Callable[[], None] = lambda: None
        self.unforeseen: list[str] = []
        self.turns = 0
        self._at_s = 0.0
        self._fired = 0  # the turn of the last timer
        self._due: list[tuple[int, asyncio.Handle]] = []
        self._later: list[tuple[float, int, int, asyncio.TimerHandle]] = []
        self._numbers = itertools.count(1)
        self._lives = itertools.count(1)
        self._tasks: dict[int, list[asyncio.Task[Any]]] = {}
        self._ended: set[int] = set()
        self.set_exception_handler(self._note)
        self.set_task_factory(_Task.made)

    # -- lives

    def new_life(self) -> int:
        """Starts a process; run its tasks in `context_of` it."""
        return next(self._lives)

    def context_of(self, life: int) -> contextvars.Context:
        """A context whose tasks belong to the life."""
        context = contextvars.copy_context()
        context.run(LIFE.set, life)
        return context

    def is_ended(self, life: int | None = None) -> bool:
        """Whether a life is over; None: the caller's."""
        return (LIFE.get() if life is None else life) in self._ended

    def end_life(self, life: int) -> None:
        """Stops everything of the life; `bury` closes its tasks, as a task cannot close itself."""
        self._ended.add(life)
        self._due = [entry for entry in self._due if entry[0] != life]

    def bury(self, life: int) -> None:
        """Closes an ended life's coroutines. The caller restores the state that they change."""
        context, tasks = self.context_of(life), self._tasks.pop(life, [])
        self._tasks[life] = tasks
        for task in tasks:  # unwinding may add tasks
            if not task.done():
                task._log_destroy_pending = False  # type: ignore[attr-defined]  # as asyncio.gather does
                context.run(_close, task)
        self._tasks[life] = []

    # -- asyncio's interface

    def time(self) -> float:
        """Virtual seconds."""
        return self._at_s

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """As asyncio's, in another order."""
        context = contextvars.copy_context() if context is None else context
        handle = asyncio.Handle(callback, args, self, context)
        life = context.get(LIFE, OUTSIDE)
        if life not in self._ended:
            self._due.append((life, handle))
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """As `call_soon`: there are no threads."""
        return self.call_soon(callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """As asyncio's."""
        context = contextvars.copy_context() if context is None else context
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._later, (when, next(self._numbers), context.get(LIFE, OUTSIDE), handle))
        return handle

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        """As asyncio's; records the task under its life."""
        task: _Task = super().create_task(coro, **options)  # type: ignore[assignment]
        context = options.get("context")
        task.life = LIFE.get() if context is None else context.get(LIFE, OUTSIDE)
        tasks = self._tasks.setdefault(task.life, [])
        if len(tasks) > 256 and LIFE.get() not in self._ended:
            tasks[:] = [t for t in tasks if not t.done()]
        tasks.append(task)
        return task

    def create_future(self) -> asyncio.Future[Any]:
        """As asyncio's; the future belongs to a life."""
        return _Future(loop=self)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Runs func inline when the pace says, unless its life ends before; the result comes
        later."""
        future = self.create_future()
        if self.is_ended():
            return future
        pace, job = self.pace(func), _Job(future, func, args)
        if pace.moves_at <= 0:
            job.move()
        else:
            self.call_later(pace.delay_s * pace.moves_at, job.move)
        self.call_later(pace.delay_s, job.tell)
        return future

    # -- turns

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Runs turns until main is done. Raises main's errors, and Stuck."""
        asyncio._set_running_loop(self)
        try:
            task = self.create_task(main)
            while not task.done():
                self._turn()
                self.between()
            return task.result()  # type: ignore[no-any-return]
        finally:
            asyncio._set_running_loop(None)

    def shut(self) -> None:
        """Ends every life and closes every coroutine."""
        asyncio._set_running_loop(self)
        try:
            lives = [*self._tasks]
            for life in lives:
                self.end_life(life)
            for life in lives:
                self.bury(life)
        finally:
            asyncio._set_running_loop(None)
            self.close()

    def _turn(self) -> None:
        if not self._due:
            self._advance()
        at = 0 if len(self._due) == 1 or self.rng.random() < self.in_order else self.rng.randrange(len(self._due))
        _, handle = self._due.pop(at)
        self._at_s += TURN_S
        self.turns += 1
        if self.turns - self._fired > STILL_TURNS:
            raise Stuck(f"{STILL_TURNS} turns at {self._at_s:.3f} s without a timer; the last one ran {handle}")
        if not handle.cancelled():
            handle._run()
        self._fire()

    def _advance(self) -> None:
        while not self._due:
            if not self._later:
                raise Stuck(f"nothing is ready at {self._at_s:.3f} s, and no timer is set")
            self._at_s = max(self._at_s, self._later[0][0])
            self._fire()

    def _fire(self) -> None:
        while self._later and self._later[0][0] <= self._at_s:
            _, _, life, handle = heapq.heappop(self._later)
            if not handle.cancelled() and life not in self._ended:
                self._due.append((life, handle))
                self._fired = self.turns

    def _note(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error, future = context.get("exception"), context.get("future")
        is_left = (
            isinstance(future, _Future | _Task) and future.life in self._ended
        )  # the waiter that was about to look at it has ended
        if not isinstance(error, Killed) and not is_left:
            self.unforeseen.append(f"{context['message']}: {error!r}")

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Does nothing: `_fire` skips cancelled timers."""


class _Future(asyncio.Future[Any]):
    """A future of a life."""

    def __init__(self, *, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self.life = LIFE.get()


class _Task(asyncio.Task[Any]):
    """A task of a life."""

    life = OUTSIDE

    @classmethod
    def made(cls, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> _Task:
        """The loop's task factory."""
        return cls(coro, loop=loop, **options)


class _Job:
    """Work for a thread: it runs once and reports once."""

    def __init__(self, future: asyncio.Future[Any], func: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._future, self._func, self._args = future, func, args
        self._result: Any = None
        self._error: BaseException | None = None
        self._is_done = False

    def move(self) -> None:
        if self._is_done:
            return
        self._is_done = True
        try:
            self._result = self._func(*self._args)
        except BaseException as error:  # the waiter gets it, as from a thread
            self._error = error

    def tell(self) -> None:
        self.move()
        if self._future.cancelled() or isinstance(self._error, Killed):
            return
        if self._error is not None:
            self._future.set_exception(self._error)
        else:
            self._future.set_result(self._result)


def _close(task: asyncio.Task[Any]) -> None:
    coroutine = task.get_coro()
    try:
        if coroutine is not None:
            coroutine.close()
    except BaseException:  # a killed process unwinds nothing; this only frees memory
        pass
