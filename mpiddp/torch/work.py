"""torch's ``Work`` and ``Future`` for operations of mpiddp."""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FunctionType
from typing import Any, TypeVar

import torch.distributed
from torch._C import _distributed_c10d as c10d
from torch._C._dynamo import eval_frame
from torch.autograd import Variable
from torch.futures import Future

from mpiddp import distributed

from .arrays import Loan
from .errors import translate

_unfinished: "set[Work]" = set()
# The last Works that have ended. torch's C++ may hold only the C++ object of a Work, and call its Python object even
# after the Work has ended, so the Python objects are kept alive for a while.
_finished: "deque[Work]" = deque(maxlen=1024)


T = TypeVar("T")


def untraced(what: T) -> T:
    """Keep Dynamo from tracing a function, or all functions of a class, and the functions that these call.

    torch's C++ also calls these functions while Dynamo traces the program.
    """
    skip = eval_frame._FrameAction.SKIP
    for each in vars(what).values() if isinstance(what, type) else (what,):
        if isinstance(each, FunctionType):
            eval_frame.set_code_exec_strategy(each.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return what


@untraced
class _Driven(Future[Any]):
    """The future of a Work.

    A wait in Python drives MPI, and a wait in C++ cannot. Therefore `Work.get_future` completes the operation before it
    returns the future, except inside a backward, which completes it later.
    """

    def __init__(self, work: "Work") -> None:
        super().__init__(devices=list({each.device for each in work.result() if each.is_cuda}))
        self._work = work

    def done(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> Any:
        self._work._wait_quietly()
        return super().wait()

    def then(self, callback: Callable[[Future[Any]], Any]) -> Future[Any]:
        self._work._wait_quietly()  # a wait for the new future would not drive MPI
        return super().then(callback)


@untraced
class Work(torch.distributed.Work):
    """One or more operations of mpiddp, their result tensors and the tensors lent to them.

    `wait` takes ``timeout_s`` seconds at most by default.
    """

    kind = int(c10d.OpType.UNKNOWN)  # type: ignore[attr-defined]

    def __init__(
        self,
        works: Sequence[distributed.Work],
        tensors: Sequence[torch.Tensor],
        loan: Loan,
        timeout_s: float | None = None,
    ) -> None:
        super().__init__()
        self._works = works
        self._tensors: Sequence[torch.Tensor] = tensors
        self._results: list[weakref.ref[torch.Tensor]] = []
        self._loan = loan
        self._timeout_s = timeout_s
        self._future: Future[Any] | None = None
        self._done = False
        self._error: Exception | None = None
        _unfinished.add(self)

    def is_completed(self) -> bool:
        """Poll the operations; return True if all have finished."""
        if not self._done and all(work.is_completed() for work in self._works):
            self._finish(None)
        return self._done

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        if not self._done:
            limit = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
            try:
                for work in self._works:
                    work.wait(limit if limit and limit > 0 else self._timeout_s)
            except Exception as error:
                self._finish(error)
            else:
                self._finish(None)
        if self._error is not None:
            raise self._error
        return True

    def _finish(self, error: Exception | None) -> None:
        if error is None:
            for work in self._works:
                error = error or work.exception()  # type: ignore[assignment]
        if error is None:
            self._loan.give_back()
        else:
            self._loan.keep()
            self._error = translate(error)
            if self._error is not error:
                self._error.__cause__ = error
        self._done = True
        if self._future is not None:
            self._complete(self._future, self._tensors, self._error)
        # The result tensors belong to the caller. With weak references the caller can free their memory.
        self._results = [weakref.ref(tensor) for tensor in self._tensors]
        self._tensors, self._works, self._future = (), (), None
        _unfinished.discard(self)
        _finished.append(self)

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def synchronize(self) -> None:
        """Wait in this thread until the operations end, because a CUDA stream cannot wait for MPI."""
        self.wait()

    block_current_stream = synchronize

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that hold the result. After the end, tensors that the caller has freed are missing."""
        found = [each() for each in self._results] if self._done else self._tensors
        return [tensor for tensor in found if tensor is not None]

    def _get_op_type(self) -> int:
        return self.kind

    def get_future(self) -> Future[Any]:
        """Return a future of the result tensors.

        Most futures are complete when they are returned, because MPI makes no progress while C++ waits for a future. A
        future that is made in a node of a backward completes later: after the last node of the backward, before
        DistributedDataParallel reads the future, or when Python waits for it. The callbacks at the end of a backward
        are not nodes, so their futures are complete. DistributedDataParallel with a static graph reduces all buckets of
        the first step in such a callback.
        """
        in_backward = torch._C._current_graph_task_id() != -1
        future = self._future
        if future is None:
            future = self._future = _Driven(self)
            if self._done:
                self._complete(future, self.result(), self._error)
                self._future = None
            elif self.is_completed():
                pass  # `is_completed` has completed the future, too
            elif torch._C._current_autograd_node() is not None:
                Variable._execution_engine.queue_callback(self.wait)
            else:
                self._wait_quietly()
        if in_backward and self._error is not None:
            raise self._error  # DistributedDataParallel's C++ would read tensors from the failed future
        return future

    def _wait_quietly(self) -> None:
        """Wait for the end of the operations. If they fail, only the future holds their error."""
        try:
            self.wait()
        except Exception:
            if self._error is None:
                raise

    def _complete(self, future: Future[Any], tensors: Sequence[torch.Tensor], error: Exception | None) -> None:
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(list(tensors))


@untraced
class Received(Work):
    """The Work of a receive, which knows the sender's rank in the group."""

    _sender = -1

    def _finish(self, error: Exception | None) -> None:
        message: Any
        (message,) = self._works
        super()._finish(error)
        if self._error is None:
            self._sender = message.sender

    def source_rank(self) -> int:
        return self._sender

    _source_rank = source_rank
