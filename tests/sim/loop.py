"""An event loop in which time is a number and chance has a seed.

Purpose: the daemon's own coroutines, run one turn at a time on a virtual clock; among the callbacks that are ready a seed chooses, so that
races show; work for threads is done inline, at its start, at its end or in between. Non-purpose: files, sockets, signals, real time.
Invariants: the same seed and the same calls give the same turns; nothing here sleeps; nothing of a life that has ended runs again.

A *life* is a process in the simulation: the daemon's present one, a client's. It is a context variable, so everything that a task
starts belongs to its life; `end_life` is what SIGKILL is to a process.
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
"""The life of whoever watches: it does not end."""
LIFE: contextvars.ContextVar[int] = contextvars.ContextVar("life", default=OUTSIDE)

TURN_S = 1e-5
"""What a callback takes, in virtual seconds."""
STILL_TURNS = 100_000
"""So many turns without a timer firing are a livelock."""


class Killed(BaseException):
    """The process ends here: raised where it dies, and caught by nobody but the loop."""


class Stuck(Exception):
    """Nothing is ready and nothing will be, or turns follow each other for ever."""


class Pace(NamedTuple):
    """Of work in a thread. delay_s: until its result is there; moves_at: share of that after which its bytes move, 0 to 1."""

    delay_s: float
    moves_at: float


class SimLoop(asyncio.BaseEventLoop):
    """See the module. rng: makes every choice. in_order: share of turns that take the callback that is ready longest.

    pace: how long work in a thread takes. between: called after each turn. unforeseen: what nobody caught.
    """

    def __init__(self, rng: random.Random, *, in_order: float = 0.5) -> None:
        super().__init__()
        self.rng, self.in_order = rng, in_order
        self.pace: Callable[[Callable[..., Any]], Pace] = lambda _work: Pace(1e-4, 1.0)
        self.between: Callable[[], None] = lambda: None
        self.unforeseen: list[str] = []
        self.turns = 0
        self._at_s = 0.0
        self._fired = 0  # the turn at which a timer fired last
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
        """A process begins; run things in `context_of` it."""
        return next(self._lives)

    def context_of(self, life: int) -> contextvars.Context:
        """A context whose tasks belong to the life."""
        context = contextvars.copy_context()
        context.run(LIFE.set, life)
        return context

    def is_ended(self, life: int | None = None) -> bool:
        """Whether a life is over; None: that of the caller."""
        return (LIFE.get() if life is None else life) in self._ended

    def end_life(self, life: int) -> None:
        """From now on nothing of it runs. What its tasks leave behind is cleared away by `bury`, which a task cannot do to itself."""
        self._ended.add(life)
        self._due = [entry for entry in self._due if entry[0] != life]

    def bury(self, life: int) -> None:
        """Closes the coroutines of an ended life. Whatever they do while they unwind reaches nobody: the caller puts back what outlives them."""
        context, tasks = self.context_of(life), self._tasks.pop(life, [])
        self._tasks[life] = tasks
        for task in tasks:  # more may join while these unwind
            if not task.done():
                task._log_destroy_pending = False  # type: ignore[attr-defined]  # what asyncio.gather does, too
                context.run(_close, task)
        self._tasks[life] = []

    # -- what asyncio asks of a loop

    def time(self) -> float:
        """Virtual seconds."""
        return self._at_s

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """As asyncio's, but for the order."""
        context = contextvars.copy_context() if context is None else context
        handle = asyncio.Handle(callback, args, self, context)
        life = context.get(LIFE, OUTSIDE)
        if life not in self._ended:
            self._due.append((life, handle))
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """The same: there are no threads."""
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
        """As asyncio's; noted under its life."""
        task: _Task = super().create_task(coro, **options)  # type: ignore[assignment]
        context = options.get("context")
        task.life = LIFE.get() if context is None else context.get(LIFE, OUTSIDE)
        tasks = self._tasks.setdefault(task.life, [])
        if len(tasks) > 256 and LIFE.get() not in self._ended:
            tasks[:] = [t for t in tasks if not t.done()]
        tasks.append(task)
        return task

    def create_future(self) -> asyncio.Future[Any]:
        """As asyncio's; it belongs to a life."""
        return _Future(loop=self)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Runs func inline at a moment that the pace chooses; its result is there later. A life that ends in between has not run it."""
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
        """Turns until main is done. Raises what main raises, and Stuck."""
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
        """Ends every life, closes every coroutine."""
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
        )  # who was about to look at it has gone
        if not isinstance(error, Killed) and not is_left:
            self.unforeseen.append(f"{context['message']}: {error!r}")

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Cancelled timers are passed over when their time comes."""


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
        """What a loop calls for a new one."""
        return cls(coro, loop=loop, **options)


class _Job:
    """Work for a thread: done once, told once."""

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
        except BaseException as error:  # it is the waiter's, as from a thread
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
    except BaseException:  # a process that is killed unwinds nothing; only memory is given back here
        pass
