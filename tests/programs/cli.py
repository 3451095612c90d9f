"""The command line, beside an event: ``cli.py EVENT ARGUMENT...``."""

import atexit
import os
import signal
import sys
import time

from mpiddp import cli
from mpiddp.training import run
from mpiddp.training.checkpointer import Checkpointer

event, *arguments = sys.argv[1:]
match event:
    case "late":
        if os.environ["RANK"] == "0":
            time.sleep(1.5)
    case "signal after saving":
        write = Checkpointer.save

        def save(self, *args, **options):
            write(self, *args, **options)
            os.kill(os.getpid(), signal.SIGUSR1)

        Checkpointer.save = save
    case "signal at the end":
        for each in (signal.SIGTERM, signal.SIGUSR1):
            atexit.register(os.kill, os.getpid(), each)
    case "signal while loading":
        load_data = run.load_data

        def load(config):
            os.kill(os.getpid(), signal.SIGUSR1)
            return load_data(config)

        run.load_data = load
sys.exit(cli.main(arguments))
