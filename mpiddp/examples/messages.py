"""``mpirun -np 4 python -m mpiddp.examples.messages``: send and recv, and a reduce and an all_reduce made of them.

``recv`` waits for its message, and ``send`` may wait for the receiver: if all ranks sent first, they might all wait for
ever. In ``pass_down`` only rank 0 sends before it has received.
``isend`` and ``irecv`` return a Work at once. Before its ``wait`` do not write to the sent array, nor read the received
array. With them all ranks can pass something around a ring at the same time.

A reduce along a tree takes log2 p rounds on p ranks: rank 3 sends to rank 2, which adds and sends to rank 0. If it adds
in the callers' arrays, as torch's backends do, it leaves *partial sums* in them. The reduce of mpiddp does not.

In an all_reduce around a ring every rank sends one of p parts to the next rank. After p - 1 steps rank r has the sum of
part r + 1. In p - 1 more steps the sums go around. Each rank sends 2 (p - 1) parts, which is less than twice the array.

Output::

    send and recv: a counter goes down the line
    rank 0 begins with [1]
    rank 1 received [1] and passed on [2]
    rank 2 received [2] and passed on [3]
    rank 3 received [3]
    reduce along a tree, in the callers' own arrays
    rank 0 had 1, now has 10, the sum
    rank 1 had 2, now has 2
    rank 2 had 3, now has 7, a partial sum
    rank 3 had 4, now has 4
    mpiddp's reduce
    rank 0 had 1, now has 10, the sum
    rank 1 had 2, now has 2
    rank 2 had 3, now has 3
    rank 3 had 4, now has 4
    all_reduce around a ring
    rank 0 has summed part 1, and sends 6 parts in all
    rank 1 has summed part 2, and sends 6 parts in all
    rank 2 has summed part 3, and sends 6 parts in all
    rank 3 has summed part 0, and sends 6 parts in all
    ring:     [10. 20. 30. 40. 50. 60. 70. 80. 90.]
    mpiddp's: [10. 20. 30. 40. 50. 60. 70. 80. 90.]
    equal on all ranks: True
"""

import numpy as np

import mpiddp as dist
from mpiddp.examples.printing import print_in_order, print_once
from mpiddp.typing import Array


def pass_down() -> None:
    """Receive a counter from the rank before, and send it to the next rank, by blocking calls."""
    rank, size = dist.get_rank(), dist.get_world_size()
    counter = np.array([1])
    said = f"begins with {counter}"
    if rank > 0:
        dist.recv(counter, src=rank - 1)
        said = f"received {counter}"
    if rank < size - 1:
        if rank > 0:
            counter += 1
            said += f" and passed on {counter}"
        dist.send(counter, dst=rank + 1)
    print_in_order(f"rank {rank} {said}")


def tree_reduce(x: Array) -> None:
    """Sum ``x`` along a binomial tree to rank 0, in place."""
    rank, size = dist.get_rank(), dist.get_world_size()
    incoming = np.empty_like(x)
    distance = 1
    while distance < size:
        if rank % (2 * distance):
            dist.send(x, dst=rank - distance)
            return
        if rank + distance < size:
            dist.recv(incoming, src=rank + distance)
            x += incoming
        distance *= 2


def report(x: Array) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    had, has = rank + 1, int(x[0])
    kind = "" if has == had else ", the sum" if has == size * (size + 1) // 2 else ", a partial sum"
    print_in_order(f"rank {rank} had {had}, now has {has}{kind}")


def pass_on(given: Array, taken: Array) -> None:
    """Send to the next rank of the ring while receiving from the rank before."""
    rank, size = dist.get_rank(), dist.get_world_size()
    works = [dist.isend(given, dst=(rank + 1) % size), dist.irecv(taken, src=(rank - 1) % size)]
    for work in works:
        if work:  # isend and irecv return None on a rank outside of the group
            work.wait()


def ring_all_reduce(x: Array) -> None:
    """Sum a flat array over all ranks, in place."""
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = np.array_split(x, size)  # views of x
    sent = 0
    for step in range(size - 1):  # gather sums
        mine, coming = parts[(rank - step) % size], parts[(rank - step - 1) % size]
        incoming = np.empty_like(coming)
        pass_on(mine, incoming)
        coming += incoming
        sent += 1
    done = (rank + 1) % size
    for step in range(size - 1):  # hand the sums around
        pass_on(parts[(done - step) % size], parts[(done - step - 1) % size])
        sent += 1
    print_in_order(f"rank {rank} has summed part {done}, and sends {sent} parts in all")


def main() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    print_once("send and recv: a counter goes down the line")
    pass_down()
    print_once("reduce along a tree, in the callers' own arrays")
    x = np.array([rank + 1])
    tree_reduce(x)
    report(x)
    print_once("mpiddp's reduce")
    x = np.array([rank + 1])
    dist.reduce(x, dst=0)
    report(x)

    print_once("all_reduce around a ring")
    ours = np.arange(1.0, 10.0) * (rank + 1)  # nine elements: parts need not be equal
    librarys = ours.copy()
    ring_all_reduce(ours)
    dist.all_reduce(librarys)
    print_once(f"ring:     {ours}\nmpiddp's: {librarys}")
    equal = np.array([np.array_equal(ours, librarys)])
    dist.all_reduce(equal, op=dist.ReduceOp.MIN)
    print_once(f"equal on all ranks: {bool(equal[0])}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
