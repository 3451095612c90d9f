"""Faults between ranks and how they are found: calls that differ, failed or exited ranks, waits that never end."""
