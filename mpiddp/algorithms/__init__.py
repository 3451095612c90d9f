"""Collective algorithms, one a module, as generators (see `mpiddp.mpi.work`); `plan` has the table that selects one.

The algorithms take validated, contiguous arrays. In all modules, with p ranks:

- broadcast copies root's ``x`` to all ranks;
- all_reduce reduces ``x`` in place; reduce changes root's ``x`` only;
- reduce_scatter cuts ``x`` into p equal blocks and reduces block r into rank r's ``output``;
- all_gather concatenates all ``x`` in ``output``; all_gather_list has an output for each rank;
- gather copies all ``x`` to root's ``outputs``; scatter copies array r of root's ``inputs`` to rank r's ``x``;
- all_to_all copies input s of rank r to output r of rank s; all_to_all_single copies blocks of given bytes.

An algorithm that does not leave the additions to MPI adds in a fixed order, in float32 for half types, and rounds once.
So every rank and every run gets the same bits.
"""
