"""Faults between ranks: different calls, failed or exited ranks, waits without end.

- Which calls differ: `calls` on a node, `between_nodes` in the background; `monitor` holds both for a group.
- What the ranks do: `activity` (this one), `liveness` (questions and answers), `picture` (each rank's state, and its
  text), `reports` (warning, timeout, Ctrl-C, where), `deadlock` (circles), `where_socket` (`python -m mpiddp where`).
- When a wait lasts too long: `watchdog`, a thread in each rank.
- How a job ends: `abort` (at once), `uncaught` (exceptions, Ctrl-C), `leaving` (all together), `mpirun` (Open MPI's),
  `marker` (what `python -m mpiddp run` reads).
- What is left of it: `dumps` writes the flight recorder, `flight` reads the files of all ranks.
- Ranks that die while others live on: `failures`. `job` holds all of these; `this_job` starts it.
"""
