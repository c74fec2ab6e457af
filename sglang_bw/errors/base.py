"""What every error is."""

from __future__ import annotations

from typing import ClassVar


class BwError(Exception):
    """Base of every error a user can cause or cure.

    :param message: what happened, in one sentence.
    :param hint: the likely cause and the next command, shown on a line of its own.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message
