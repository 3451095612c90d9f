"""What `python -m mpiddp bench tune` has found on a machine: a file for each user, MPI library and host.

It holds the rows of `select`'s table for each shape of a group that was tuned. One rank reads it and tells the others:
a rank with a table of its own would run another algorithm than its peers.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TypeAlias

from mpiddp import settings

Rows: TypeAlias = tuple[tuple[float, str], ...]
"""Algorithms for growing arrays, each with the number of bytes up to which it is the best."""

Table: TypeAlias = dict[str, Rows]
"""Rows by operation."""

FORMAT = "mpiddp-tuned/1"


def shape(nodes: tuple[int, ...]) -> str:
    """Return what counts of a group's places: its ranks on each node, without their order.

    Examples
    --------
    >>> shape((0, 0, 1, 1, 1)), shape((5, 5))
    ('2+3', '2')
    """
    return "+".join(map(str, sorted(nodes.count(node) for node in set(nodes))))


def path(library: str, host: str) -> Path:
    """Return the file for an MPI library (its name and version) and the host of the first rank."""
    name = re.sub(r"[^a-z0-9.]+", "-", f"{library} {host}".lower()).strip("-")
    return settings.cache_folder() / f"tuned-{name}.json"


def read(file: Path) -> dict[str, Table]:
    """Return the tables of a file by the shape of their group; none where there is no file.

    Raises
    ------
    ValueError
        If the file is there and holds something else.
    """
    try:
        document = json.loads(file.read_text())
        if document["format"] != FORMAT:
            raise ValueError(f"its format is {document['format']!r}")
        return {
            each: {
                operation: tuple((_limit(end), str(name)) for end, name in rows) for operation, rows in table.items()
            }
            for each, table in document["shapes"].items()
        }
    except OSError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is no table of algorithms ({error}); delete it, and run bench tune again") from error


def write(file: Path, tables: dict[str, Table]) -> None:
    """Write tables, whole or not at all."""
    shapes = {
        each: {name: [[None if end == float("inf") else end, how] for end, how in rows] for name, rows in table.items()}
        for each, table in tables.items()
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(file.name + ".part")
    beside.write_text(json.dumps({"format": FORMAT, "shapes": shapes}, indent=1) + "\n")
    beside.replace(file)


def _limit(end: float | None) -> float:
    """Return a limit, which JSON writes as null where there is none."""
    return float("inf") if end is None else float(end)
