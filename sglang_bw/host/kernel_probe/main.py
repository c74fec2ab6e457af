"""The child process: one JSON object a line on standard output, everything the engine prints on standard error."""

from __future__ import annotations

import itertools
import json
import os
import sys
import traceback
from dataclasses import asdict
from typing import Any, TextIO

from sglang_bw.host.kernel_probe import board
from sglang_bw.host.kernel_probe.engine import AbsentError, Case, cases, configure
from sglang_bw.host.kernel_probe.recorder import recording


def main(facts: str, parts: tuple[str, ...], first: int) -> None:
    """Check the cases of some parts of the engine's path, from number ``first`` on.

    :param facts: the fields of ``board.Board``, as JSON.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    values = json.loads(facts)
    board.put(board.Board(**{**values, "capability": tuple(values["capability"])}))
    import torch
    import triton
    from sglang.version import __version__

    _tell(out, event="start", engine=__version__, torch=torch.__version__, triton=triton.__version__)
    configure()
    chosen = (case for case in cases() if case.family in parts)
    for case in itertools.islice(chosen, first, None):
        _tell(out, event="case", family=case.family, name=case.name, shape=case.shape)
        _tell(out, event="checked", **_check(case))
    _tell(out, event="end")


def _check(case: Case) -> dict[str, Any]:
    absent = problem = ""
    with recording() as recorder:
        try:
            with board.tensors_without_memory():
                case.run()
        except AbsentError as error:
            absent = str(error)
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            problem = f"{type(error).__name__}: {error}"
    if not (absent or problem or recorder.launches):
        problem = "launched no Triton kernel"
    return {"absent": absent, "problem": problem, "launches": [asdict(launch) for launch in recorder.launches]}


def _tell(out: TextIO, **fields: Any) -> None:
    out.write(json.dumps(fields) + "\n")
    out.flush()
