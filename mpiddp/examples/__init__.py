"""Small programs to learn from. Each begins with the command that runs it and shows its output.

``python -m mpiddp.examples`` prints this list: name, ranks, subject. ``mpirun -np RANKS python -m mpiddp.examples
NAME`` runs one.

Ranks and messages

    hello              4  ranks, nodes, barrier; what is a backend, and why does nobody need MASTER_ADDR?
    messages           4  send and recv; reduce and all_reduce by hand; why other ranks hold partial sums in torch
    collectives        4  all of them, in pictures; must I know the shapes before all_gather? among some of the ranks

Training on many ranks

    sgd                4  every step in sight: by hand, then with DistributedDataParallel
    gradients          2  why divide them by the world size? no_sync: several batches, sent once
    batches            2  what goes wrong without set_epoch? uneven numbers of batches; SyncBatchNorm
    elastic            4  a rank dies, a spare takes its place, and no bit changes
    model_parallel     4  one model, its layers or its weights on several ranks; when to scale up, when out
"""

from mpiddp import launchers
from mpiddp.cores import limit_blas_threads

if launchers.launch() is not None:  # before NumPy is imported, as python -m mpiddp does it
    limit_blas_threads()
