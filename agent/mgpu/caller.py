"""Calls into a driver that may never return, made by threads that hold up nobody else."""

import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Callable, Optional, TypeVar

T = TypeVar("T")


class NoAnswer(Exception):
    """An NVML call has not returned in time."""


class Caller:
    """A thread that makes calls, so that one that hangs in the driver holds up nobody else.

    It is one thread however long the hang: while a call is under way no other is begun.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._wake = threading.Condition()
        self._job: Optional[Callable[[], Any]] = None
        self._answer: Future[Any] = Future()
        self._thread: Optional[threading.Thread] = None

    @property
    def busy(self) -> bool:
        return self._job is not None

    def ask(self, call: Callable[[], T]) -> "Future[T]":
        """Have ``call`` made. The future fails with NoAnswer if an earlier call still runs."""
        answer: Future[T] = Future()
        with self._wake:
            if self.busy:
                answer.set_exception(NoAnswer())
                return answer
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
            self._job, self._answer = call, answer
            self._wake.notify()
        return answer

    def _work(self) -> None:
        while True:
            with self._wake:
                while self._job is None:
                    self._wake.wait()
                job, answer = self._job, self._answer
            value: Any = None
            failure: Optional[Exception] = None
            try:
                value = job()
            except Exception as error:  # whoever waits for the answer gets it
                failure = error
            with self._wake:
                self._job = None
            if failure is not None:
                answer.set_exception(failure)
            else:
                answer.set_result(value)


def result_of(answer: "Future[T]", deadline_s: float) -> T:
    """The answer, or the error that the call ended with. Raises NoAnswer after the deadline."""
    try:
        return answer.result(max(0.0, deadline_s - time.monotonic()))
    except FutureTimeout as error:
        raise NoAnswer() from error
