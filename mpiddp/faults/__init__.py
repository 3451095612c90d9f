"""Faults between ranks: different calls, failed or exited ranks, waits without end.

- Comparison of the ranks' calls: `calls` on a node, `between_nodes` in the background; `monitor` holds both for a
  group.
- The states of the ranks: `activity` (of this one), `liveness` (questions and answers), `picture` (each rank's state,
  and its text), `reports` (warning, timeout, Ctrl-C, `python -m mpiddp where`), `deadlock` (circles of ranks that wait
  for each other), `where_socket` (questions of `python -m mpiddp where`).
- Waits that last too long: `watchdog`, a thread in each rank.
- The beginning of a job: `meeting` (all ranks come together, or the missing ones are named).
- The end of a job: `abort` (at once), `uncaught` (exceptions, Ctrl-C), `leaving` (all ranks together), `mpirun` (Open
  MPI's launcher), `marker` (the file that `python -m mpiddp run` reads).
- Records of a job: `dumps` writes the flight recorder, `flight` reads the files of all ranks.
- Ranks that die while others live on: `failures`.

`job` joins the parts that belong to one communicator. `this_job` starts, replaces and ends the job of this process.
"""
