"""Faults between ranks: different calls, failed or exited ranks, waits without end."""
