"""Which libraries this process has loaded, as the system sees it. Imports nothing of mpiddp."""

from __future__ import annotations

import os
from pathlib import Path


def mapped_libraries(*prefixes: str, maps: Path = Path("/proc/self/maps")) -> list[str]:
    """Return the paths of the loaded libraries whose file names begin so; none where there is no ``maps``."""
    if not maps.exists():
        return []
    fields = (line.split(maxsplit=5) for line in maps.read_text().splitlines())
    paths = dict.fromkeys(parts[5] for parts in fields if len(parts) == 6)
    return [path for path in paths if os.path.basename(path).startswith(prefixes)]  # noqa: PTH119 - as the kernel wrote it
