"""Read a configuration that came from elsewhere: every field checked, every finding kept."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_LARGEST = 1 << 40


class Fields:
    """One level of a configuration, read with the checks that a file from elsewhere needs."""

    def __init__(self, data: Mapping[str, Any], findings: list[str]) -> None:
        self._data = data
        self._findings = findings

    def any(self, *names: str) -> Any:
        """Return the first of these fields that is set."""
        return next((self._data[name] for name in names if self._data.get(name) is not None), None)

    def number(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """Return a whole number; a finding when it is missing without a default, no number or too small."""
        value = self.any(*names)
        if value is None:
            if default is None:
                self._findings.append(f"{' or '.join(names)} is missing")
            return least if default is None else default
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
            or value != int(value)
        ):
            self._findings.append(f"{names[0]} is {value!r}, not a whole number")
            return least
        if not least <= value <= _LARGEST:
            self._findings.append(f"{names[0]} is {value}, expected {least} or more")
            return least
        return int(value)

    def texts(self, name: str) -> list[str]:
        """Return a list of strings, empty when it is none."""
        value = self._data.get(name)
        return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []

    def numbers(self, name: str) -> list[int]:
        """Return a list of whole numbers, empty when it is none."""
        value = self._data.get(name)
        return [item for item in value if type(item) is int] if isinstance(value, list) else []

    def parts(self, name: str) -> list[Fields]:
        """Return the nested configurations of a mapping of them."""
        value = self._data.get(name)
        items = value.values() if isinstance(value, Mapping) else ()
        return [Fields(item, self._findings) for item in items if isinstance(item, Mapping)]

    def part(self, *names: str) -> Fields | None:
        """Return a nested configuration."""
        value = self.any(*names)
        return Fields(value, self._findings) if isinstance(value, Mapping) else None
