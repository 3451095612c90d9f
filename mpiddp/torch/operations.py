"""torch's communicating calls, carried out on a group of mpiddp.

``torch.distributed`` and torch's C++ call the methods of `Operations`, which have torch's names. Each method lends its
tensors as arrays to one public function of mpiddp. It returns a Work, or None if the call is over. `dispatch.entry`
converts other forms of a call to the arguments of these methods.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from mpiddp import distributed
from mpiddp.mpi import recorder
from mpiddp.typing import Array

from . import cuda, default
from .arrays import Loan, as_array, symmetric_empty
from .errors import ArgumentError, expect, translated
from .options import DEFAULTS, UNSET, Tensors, expect_alike, reduction, root_of, seconds, single
from .work import Received, Work

_AVG = distributed.ReduceOp.AVG

recorder.add_library(str(Path(torch.__file__).parent))  # the flight recorder shows the program's lines, not torch's


class Operations:
    """torch's communicating calls in a group of mpiddp; a subclass is also one of torch's classes."""

    supports_splitting = False
    """False, so that torch makes groups of some ranks by ``new_group`` instead of splitting this group."""
    supports_coalescing = True
    """True, so that torch may collect several calls between `start_coalescing` and `end_coalescing`."""

    def __init__(self, group: distributed.ProcessGroup, timeout: timedelta) -> None:
        self._rank, self._size = group.rank(), group.size()
        super().__init__(self._rank, self._size)  # type: ignore[call-arg] # torch's class takes them
        self.group = group
        self.timeout = timeout
        self._timeout_s = seconds(timeout)
        self._first = group._link.sequence
        self._coalesced: list[Work] | None = None

    # ---- properties of a backend that torch reads, and the end of a group

    def getBackendName(self) -> str:  # noqa: N802
        return "mpiddp"

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return torch.device(device).type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a tensor in memory that the ranks of a node share. All ranks of the group call this together."""
        return symmetric_empty(size, dtype, self.group)

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout, self._timeout_s = timeout, seconds(timeout)

    def _set_sequence_number_for_group(self) -> None:
        self._first = self.group._link.sequence

    def _get_sequence_number_for_group(self) -> int:
        """Return the number of collectives that the group has begun."""
        return self.group._link.sequence - self._first

    def shutdown(self) -> None:
        """End the group. All of its ranks call this together."""
        if not self.group._link.closed:
            with translated():
                default.end(self.group)

    def abort(self) -> None:
        """Do nothing. A rank cannot free the group without the others, so the group stays until the program ends."""

    # ---- how every call is made

    def _call(
        self,
        function: Callable[..., distributed.Work | None],
        calls: Sequence[tuple[Any, ...]],
        outputs: Tensors,
        loan: Loan,
        opts: Any,
        **named: Any,
    ) -> Work | None:
        """Call ``function`` of mpiddp once for each tuple of arguments in ``calls``.

        Return one Work for all of these calls, or None if they are over.
        """
        if loan.device is not None:
            device, loan.device = loan.device, None
            with cuda.on_stream(device):
                return self._call(function, calls, outputs, loan, opts, **named)
        averages = named.get("op") is _AVG and calls and calls[0][0].dtype.kind in "iu"
        if averages:
            named["op"] = distributed.ReduceOp.SUM
        try:
            if self._blocks(opts) and not averages:
                for arguments in calls:
                    function(*arguments, group=self.group, **named)
                loan.give_back()
                return None
            works: Any = [function(*arguments, group=self.group, async_op=True, **named) for arguments in calls]
        except BaseException as error:
            loan.fail(error)
            raise
        if averages and named.get("group_dst", self._rank) == self._rank:
            for arguments, work in zip(calls, works, strict=True):
                loan.divide(arguments[0], self._size, work)
        limit_s = seconds((opts or DEFAULTS).timeout) or self._timeout_s
        return self._submitted(Work(works, outputs, loan, limit_s))

    def _blocks(self, opts: Any) -> bool:
        """Return True if a call may wait for its end before it returns.

        Such a call is not asynchronous, and is not collected after `start_coalescing`. Neither the call nor the group
        has a timeout other than torch's default.
        """
        return (
            opts is not None
            and not opts.asyncOp
            and self._coalesced is None
            and self._timeout_s is None
            and (opts.timeout == UNSET or seconds(opts.timeout) is None)
        )

    def _submitted(self, work: Work) -> Work:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def start_coalescing(self, device: Any = None) -> None:
        self._coalesced = []

    def end_coalescing(self, device: Any = None) -> Work:
        """Return one Work for all calls since `start_coalescing`."""
        collected, self._coalesced = self._coalesced or [], None
        return Work(collected, [each for work in collected for each in work.result()], Loan())

    _start_coalescing, _end_coalescing = start_coalescing, end_coalescing

    # ---- collectives

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work | None:
        op, loan = reduction(opts), Loan()
        if len(tensors) == 1 and op is not _AVG and self._blocks(opts) and (x := loan.memory(tensors[0])) is not None:
            # This does the same as `_call` in half the time, which matters for an array of 8 bytes.
            try:
                distributed.all_reduce(x, op, self.group)
            except BaseException as error:
                loan.fail(error)
                raise
            return None
        tensor = single(tensors, "tensor list")
        if not tensor.is_sparse:
            return self._call(distributed.all_reduce, [(loan.output(tensor),)], tensors, loan, opts, op=op)
        with translated(), torch.no_grad():  # copying into tensor.detach() would not change the tensor's indices
            tensor.copy_(_sparse_sum(tensor, op, self.group))
        return self._submitted(Work([], tensors, loan))

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work | None:
        loan, op = Loan(), reduction(opts)
        expect(len(tensors) > 0, "requires non-empty tensor list")
        expect(len({each.layout for each in tensors}) == 1, "invalid tensor layout at index: expected one layout")
        expect(tensors[0].layout is torch.strided, f"unsupported layout {tensors[0].layout}")
        expect(len({each.dtype for each in tensors}) == 1, "tensors must all have the same type")
        calls = [(each,) for each in loan.outputs(tensors)]
        return self._call(distributed.all_reduce, calls, tensors, loan, opts, op=op)

    def broadcast(self, tensors: Tensors, opts: Any) -> Work | None:
        loan, root = Loan(moved=True), root_of(opts, self._size)
        expect(opts.rootTensor == 0, "invalid root tensor")
        tensor = single(tensors, "tensor list")
        x = loan.input(tensor) if root == self._rank else loan.output(tensor)
        return self._call(distributed.broadcast, [(x,)], tensors, loan, opts, group_src=root)

    def reduce(self, tensors: Tensors, opts: Any) -> Work | None:
        loan, root = Loan(), root_of(opts, self._size)
        expect(opts.rootTensor == 0, "invalid root tensor")
        tensor = single(tensors, "tensor list")
        x = loan.output(tensor) if root == self._rank else loan.input(tensor)
        return self._call(distributed.reduce, [(x,)], tensors, loan, opts, group_dst=root, op=reduction(opts))

    def barrier(self, opts: Any = None) -> Work | None:
        return self._call(distributed.barrier, [()], (), Loan(), opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        with translated():
            distributed.monitored_barrier(self.group, getattr(timeout, "timeout", timeout), wait_all_ranks)

    def allgather(self, output_tensors: Sequence[Tensors], input_tensors: Tensors, opts: Any = None) -> Work | None:
        tensor, outputs = single(input_tensors, "input tensor list"), single(output_tensors, "output list")
        expect(len(outputs) == self._size, "invalid output tensor list: expected one for each rank")
        expect_alike(tensor, outputs)
        loan = Loan(moved=True)
        arguments = [loan.output(each) for each in outputs], loan.input(tensor)
        return self._call(distributed.all_gather, [arguments], outputs, loan, opts)

    def allgather_coalesced(
        self, output_lists: Sequence[Tensors], input_list: Tensors, opts: Any = None
    ) -> Work | None:
        """Gather each tensor of ``input_list``: that of a rank goes to ``output_lists[rank][index]``."""
        found = len(output_lists)
        expect(found == self._size, f"output lists should be equal to world size {self._size}, got {found}")
        for mine in output_lists:
            expect(len(mine) == len(input_list), f"invalid output size: expected {len(input_list)}, got {len(mine)}")
            for index, (output, tensor) in enumerate(zip(mine, input_list, strict=True)):
                expect(output.shape == tensor.shape, f"invalid size of output tensor at index {index}")
                expect(output.dtype == tensor.dtype, f"invalid tensor type at index {index}")
        loan, lists = Loan(moved=True), list(zip(*output_lists, strict=True))
        calls = [
            ([loan.output(each) for each in mine], loan.input(x)) for mine, x in zip(lists, input_list, strict=True)
        ]
        outputs = [each for mine in lists for each in mine]
        return self._call(distributed.all_gather, calls, outputs, loan, opts)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work | None:
        return Operations.all_gather_single_coalesced(self, [output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work | None:
        """Call mpiddp's ``all_gather_single`` for each pair of tensors.

        Return one Work for all of these calls, or None if they are over.
        """
        loan = Loan(moved=True)
        calls = [(loan.output(output), loan.input(x)) for output, x in zip(outputs, inputs, strict=True)]
        return self._call(distributed.all_gather_single, calls, outputs, loan, opts)

    def gather(self, output_tensors: Sequence[Tensors], input_tensors: Tensors, opts: Any) -> Work | None:
        loan, root = Loan(moved=True), root_of(opts, self._size)
        tensor = single(input_tensors, "input tensor list")
        mine = self._list_of_root(root, output_tensors, "output", tensor)
        arguments = loan.input(tensor), [loan.output(each) for each in mine] or None
        return self._call(distributed.gather, [arguments], mine, loan, opts, group_dst=root)

    def scatter(self, output_tensors: Tensors, input_tensors: Sequence[Tensors], opts: Any) -> Work | None:
        loan, root = Loan(moved=True), root_of(opts, self._size)
        tensor = single(output_tensors, "output tensor list")
        mine = self._list_of_root(root, input_tensors, "input", tensor)
        arguments = loan.output(tensor), [loan.input(each) for each in mine] or None
        return self._call(distributed.scatter, [arguments], output_tensors, loan, opts, group_src=root)

    def _list_of_root(self, root: int, lists: Sequence[Tensors], role: str, tensor: torch.Tensor) -> Tensors:
        """Return, on the root, the list of tensors that it gathers or scatters, one for each rank; () on other ranks.

        ArgumentError if ``lists`` does not hold these tensors.
        """
        if root != self._rank:
            expect(not lists or not lists[0], f"requires empty {role} on non-root")
            return ()
        mine, size = single(lists, f"{role} list"), self._size
        expect(len(mine) == size, f"Incorrect {role} list size {len(mine)}. {role.title()} list size should be {size}")
        expect_alike(tensor, mine)
        return mine

    def reduce_scatter(self, output_tensors: Tensors, input_tensors: Sequence[Tensors], opts: Any) -> Work | None:
        loan = Loan()
        inputs = [loan.input(each) for each in single(input_tensors, "input list")]
        x = loan.output(single(output_tensors, "output tensor list"))
        return self._call(distributed.reduce_scatter, [(x, inputs)], output_tensors, loan, opts, op=reduction(opts))

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work | None:
        return Operations.reduce_scatter_single_coalesced(self, [output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work | None:
        """Call mpiddp's ``reduce_scatter_single`` for each pair of tensors.

        Return one Work for all of these calls, or None if they are over.
        """
        loan = Loan()
        calls = [(loan.output(output), loan.input(x)) for output, x in zip(outputs, inputs, strict=True)]
        return self._call(distributed.reduce_scatter_single, calls, outputs, loan, opts, op=reduction(opts))

    def alltoall(self, output_tensors: Tensors, input_tensors: Tensors, opts: Any = None) -> Work | None:
        loan = Loan(moved=True)
        arguments = [loan.output(each) for each in output_tensors], [loan.input(each) for each in input_tensors]
        return self._call(distributed.all_to_all, [arguments], output_tensors, loan, opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> Work | None:
        loan = Loan(moved=True)
        arrays = _rows(loan.output(output), output), _rows(loan.input(input), input)
        splits = output_split_sizes or None, input_split_sizes or None
        return self._call(distributed.all_to_all_single, [(*arrays, *splits)], (output,), loan, opts)

    # ---- point to point

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> Work:
        """Send a tensor to ``dst``, a rank of the group."""
        loan = Loan(moved=True)
        return self._message(distributed.isend, loan.input(tensors[0]), tensors, loan, tag, group_dst=dst)

    def recv(self, tensors: Tensors, src: int | None, tag: int = 0) -> Work:
        """Receive a tensor from ``src``, a rank of the group, or from any rank if it is None."""
        loan = Loan(moved=True)
        return self._message(distributed.irecv, loan.output(tensors[0]), tensors, loan, tag, group_src=src)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        return Operations.recv(self, tensors, None, tag)

    def _message(self, function: Any, x: Array, tensors: Tensors, loan: Loan, tag: int, **peer: int | None) -> Work:
        with translated(), nullcontext() if loan.device is None else cuda.on_stream(loan.device):
            work = function(x, group=self.group, tag=tag, **peer)
        made = Work if function is distributed.isend else Received
        return self._submitted(made([work], tensors, loan, self._timeout_s))

    # ---- names that older versions of torch use for these methods

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
    allreduce_sparse = allreduce


def _rows(flat: Array, tensor: torch.Tensor) -> Array:
    """Return a tensor's flat array in the shape (rows, rest), because all_to_all_single cuts arrays into rows."""
    rows = tensor.shape[0] if tensor.ndim else 1
    return flat.reshape(rows, flat.size // max(rows, 1))


def _sparse_sum(tensor: torch.Tensor, op: distributed.ReduceOp, group: distributed.ProcessGroup) -> torch.Tensor:
    """Return the sum of the ranks' sparse tensors. Each rank gathers all indices and values, and adds them itself."""
    if op is not distributed.ReduceOp.SUM:
        raise ArgumentError(f"unsupported reduction operation: sparse tensors can be reduced by SUM only, got {op}")
    mine = tensor.detach().coalesce()
    parts: list[Any] = [None] * group.size()
    distributed.all_gather_object(parts, (as_array(mine.indices().cpu()), as_array(mine.values().cpu())), group)
    indices = torch.cat([torch.from_numpy(part) for part, _ in parts], dim=1)
    values = torch.cat([torch.from_numpy(part) for _, part in parts])
    total = torch.sparse_coo_tensor(indices, values, tensor.shape, device=tensor.device, check_invariants=False)
    return total.coalesce()
