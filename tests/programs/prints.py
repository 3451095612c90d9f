"""Print: ``prints.py LINES``; without lines sleep after the first words, before the process group is made."""

import os
import sys
import time

import mpiddp as dist

rank, lines = os.environ["RANK"], int(sys.argv[1])
if not lines:
    print("first from", rank)
    time.sleep(30)
dist.init_process_group()
for line in range(lines):
    print("rank", rank, "has", line, "x" * (line % 90), "end")
