"""Collective algorithms, one idea a file, as generators (see `mpiddp.mpi.work`), and the table that chooses.

They take validated, contiguous arrays. In all modules, with p ranks:

- broadcast copies root's ``x``;
- all_reduce reduces ``x`` in place; reduce into root's ``x``, leaving the others';
- reduce_scatter reduces block r of ``x``, of p equal ones, into rank r's ``output``;
- all_gather concatenates all ``x`` in ``output``, all_gather_list takes an output for each;
- gather copies all ``x`` to root's ``outputs``; scatter array r of root's ``inputs`` to rank r's ``x``;
- all_to_all copies input s of rank r to output r of rank s; all_to_all_single blocks of given bytes.

Rows are combined in a fixed order, half types in float32, rounded once: every rank and run gets the same bits.
"""
