"""Small programs to learn from. The docstring of each begins with the command that runs it, and shows its output.

``python -m mpiddp.examples`` prints this list, with each program's name, number of ranks, and subject.
``mpirun -np RANKS python -m mpiddp.examples NAME`` runs a program.

Ranks and messages

    hello              4  ranks, nodes, barrier; what is a backend, and why does nobody need MASTER_ADDR?
    messages           4  send and recv; reduce and all_reduce by hand; why torch's reduce leaves partial sums
    collectives        4  all collectives, in pictures; must I know the shapes before all_gather? groups of ranks

Training on many ranks

    sgd                4  distributed SGD, by hand and then with DistributedDataParallel
    gradients          2  why divide gradients by the world size? no_sync: add up several batches, and send once
    batches            2  what goes wrong without set_epoch? uneven numbers of batches; SyncBatchNorm
    elastic            4  a rank dies, a spare takes its place, and no bit changes
    model_parallel     4  one model, its layers or its weights on several ranks; when to scale up, when out
"""

from mpiddp import launchers
from mpiddp.cores import limit_blas_threads

if launchers.launch() is not None:  # before NumPy is imported, as in python -m mpiddp
    limit_blas_threads()
