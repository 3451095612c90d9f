"""Print: ``prints.py LINES``, or ``prints.py before|after`` the process group is made, and sleep."""

import os
import sys
import time

import mpiddp as dist

rank = os.environ["RANK"]
if sys.argv[1] == "before":
    print("first from", rank)
    time.sleep(30)
dist.init_process_group()
if sys.argv[1] == "after":
    print("first from", rank)
    time.sleep(30)
for line in range(int(sys.argv[1])):
    print("rank", rank, "has", line, "x" * (line % 90), "end")
