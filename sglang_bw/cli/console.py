"""Where the tool prints: tables and progress for people, JSON for programs."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console

# Neither highlighting nor emoji: what is printed is printed as it is.
out = Console(highlight=False, emoji=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """Print ``value`` as indented JSON, the only thing on standard output."""
    out.print(json.dumps(value, indent=2, default=str), markup=False)
