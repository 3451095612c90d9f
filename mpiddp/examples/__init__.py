"""Small programs to learn from. Each begins with the command that runs it and shows its output.

``python -m mpiddp.examples`` prints this list: name, ranks, subject. ``mpirun -np RANKS python -m mpiddp.examples
NAME`` runs one; without ranks, ``python -m mpiddp.examples NAME`` does.

Ranks and messages

    hello              4  ranks, nodes, barrier; what is a backend, and why does nobody need MASTER_ADDR?
    point_to_point     4  send and recv, isend and irecv
    collectives        4  all of them, in pictures; must I know the shapes before all_gather?
    groups             4  collectives among some of the ranks
    halo_exchange      4  blocks of a plate on a mesh of ranks, their edges, and a gradient through both
    tree_and_ring      4  reduce and all_reduce by hand; why do other ranks hold partial sums after torch's reduce?
    collective_costs   -  what do collectives save?

Training on many ranks

    sgd                4  every step in sight: by hand, then with DistributedDataParallel
    torch_user         2  a torch user's script, and its changes
    gradients          2  why divide them by the world size? no_sync: several batches, sent once
    set_epoch          2  what goes wrong without set_epoch?
    ddp_timeline       2  what does DDP do between the first gradient and optimizer.step?
    sync_batchnorm     2  batch normalisation over the batches of all ranks
    uneven_inputs      4  ranks with different numbers of batches, by join
    checkpoint_resume  4  stop in the middle of an epoch, go on to the same bits
    elastic            4  a rank dies, a spare takes its place, and no bit changes
    data_parallel      -  one process and threads, no ranks
    tensor_parallel    4  the weights of a layer on several ranks of a mesh, batches on others
    jax_grad           2  gradients of jax.grad, averaged over the ranks
    model_parallel     2  one model, its layers on two ranks; when to scale up, when out
"""

from mpiddp import settings

if settings.launch() is not None:  # before NumPy is imported, as python -m mpiddp does it
    settings.limit_blas_threads()
