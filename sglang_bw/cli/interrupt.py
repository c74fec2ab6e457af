"""Signals that end a command in the way that Ctrl-C does."""

from __future__ import annotations

import signal
from types import FrameType


def end_like_ctrl_c(*numbers: signal.Signals) -> None:
    """Let signals do what SIGINT does at the time when they come; one that is ignored, as under nohup, stays so.

    While an event loop runs that is a cancellation of its task. To raise ``KeyboardInterrupt`` there would not do: the
    handler may interrupt a destructor or a callback whose exceptions Python only prints.
    """
    for number in numbers:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)


def _interrupt(_number: int, frame: FrameType | None) -> None:
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):  # ignored, as in the background of a shell
        raise KeyboardInterrupt
    handler(signal.SIGINT, frame)
