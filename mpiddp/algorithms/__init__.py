"""Collective algorithms, one a module, as generators (see `mpiddp.mpi.work`); `plan` has the table that selects one.

The algorithms take validated, contiguous arrays. In all modules, with p ranks:

- broadcast copies root's ``x`` to all ranks;
- all_reduce reduces ``x`` in place; reduce changes root's ``x`` only;
- reduce_scatter cuts ``x`` into p equal blocks and reduces block r into rank r's ``output``;
- all_gather concatenates all ``x`` in ``output``; all_gather_list has an output for each rank;
- gather copies all ``x`` to root's ``outputs``; scatter copies array r of root's ``inputs`` to rank r's ``x``;
- all_to_all copies input s of rank r to output r of rank s; all_to_all_single does so with blocks of one input array
  and one output array, whose sizes in bytes are given.

An algorithm that leaves the additions neither to MPI nor to NCCL adds in a fixed order. It adds half types in float32
and rounds the sum once. So every rank and every run gets the same bits.
"""
