"""Small programs to learn from; each begins with the command that runs it and shows what one sees.

``python -m mpiddp.examples`` prints this list; ``mpirun -np 4 python -m mpiddp.examples.NAME`` runs one.

Ranks and messages

- ``hello``: who am I? Rank, local rank, node
- ``barrier``: nobody goes on before all have come
- ``point_to_point``: send and recv, isend and irecv
- ``collectives``: all of them, with a picture of who has what before and after
- ``groups``: collectives among some of the ranks
- ``reduce``: one rank gets the sum, the others keep their data
- ``ring_all_reduce``: an all_reduce of one's own in 30 lines, against the library's

Training on many ranks

- ``sgd_by_hand``: DataPartitioner and average_gradients, every step in sight
- ``sgd_ddp``: the same with DistributedDataParallel
- ``torch_user``: a torch user's script, and what changes in it
- ``no_sync``: gradients of several batches, sent once
- ``sync_batchnorm``: batch normalisation over the batches of all ranks
- ``uneven_inputs``: ranks with different numbers of batches, by join
- ``checkpoint_resume``: stop in the middle of an epoch, go on to the same bits
- ``data_parallel``: one process and threads, no ranks
- ``model_parallel``: one model, its layers on two ranks; when to scale up, when out

Questions

- ``partial_sums``: why do other ranks hold partial sums after torch's reduce, and not after ours?
- ``unknown_shapes``: must I know the shapes before all_gather?
- ``backends``: what is a backend, and why does nobody need MASTER_ADDR here?
- ``divide_by_world_size``: why divide the sum of gradients by the world size?
- ``set_epoch``: what goes wrong without set_epoch?
- ``collective_costs``: what do collectives save?
- ``ddp_timeline``: what does DDP do between the first gradient and optimizer.step?
"""

from mpiddp import settings

if settings.launch() is not None:  # before NumPy is imported, as python -m mpiddp does it
    settings.limit_blas_threads()
