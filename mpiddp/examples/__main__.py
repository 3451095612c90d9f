"""``python -m mpiddp.examples`` prints the list of examples, and with a name it runs that example."""

import re
import runpy
import sys

from mpiddp import examples
from mpiddp.examples.printing import on_first_rank, print_once
from mpiddp.training.options import nearest

if __name__ == "__main__":
    text = str(examples.__doc__).strip().replace("``", "")
    names = re.findall(r"^    (\w+) ", text, re.MULTILINE)
    if len(sys.argv) == 1:
        print_once(text)
    elif (name := sys.argv.pop(1)) in names:
        runpy.run_module(f"{examples.__name__}.{name}", run_name="__main__", alter_sys=True)
    else:
        said = f"there is no example {name!r}{nearest(name, names)}; without a name this command lists them"
        sys.exit(said if on_first_rank() else 0)
