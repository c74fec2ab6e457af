"""GPU boards by name: what the plan has to know of a machine that is not there."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from sglang_bw.errors import UnknownBoardError

_MIB = 1 << 20
_NVIDIA_SMI = "`nvidia-smi` of the board, as printed in public logs"


@dataclass(frozen=True)
class Board:
    """One board.

    :ivar name: as NVIDIA sells it, without the brand.
    :ivar arch: ``sm120``.
    :ivar memory_mib: total as ``nvidia-smi`` prints it, in MiB; the engine's defaults depend on this number.
    :ivar fabric: ``pcie`` or ``nvlink``, how several of them are usually joined.
    :ivar aliases: other spellings.
    :ivar source: where ``memory_mib`` comes from.
    """

    name: str
    arch: str
    memory_mib: int
    fabric: str = "pcie"
    aliases: tuple[str, ...] = ()
    source: str = _NVIDIA_SMI

    @property
    def memory_bytes(self) -> int:
        """Total in bytes."""
        return self.memory_mib * _MIB


BOARDS: tuple[Board, ...] = (
    Board(
        "RTX PRO 6000",
        "sm120",
        97887,
        aliases=(
            "RTX PRO 6000 Blackwell Workstation Edition",
            "RTX PRO 6000 Blackwell Max-Q Workstation Edition",
            "RTX PRO 6000 Blackwell Server Edition",
            "RTX PRO 6000 Blackwell",
            "RTX 6000 PRO",
            "PRO 6000",
            "RTX 6000 Blackwell",
        ),
    ),
    Board("RTX PRO 5000 72GB", "sm120", 73415, aliases=("RTX PRO 5000 72GB Blackwell", "RTX PRO 5000 Blackwell 72GB")),
    Board("RTX 5090", "sm120", 32607, aliases=("GeForce RTX 5090", "5090")),
    Board(
        "GB10",
        "sm121",
        124611,
        aliases=("DGX Spark", "Spark"),
        source="total that CUDA reports, 121.69 GiB, shared with the CPU; nvidia-smi prints N/A",
    ),
    Board("B200", "sm100", 183359, "nvlink"),
    Board("GB200", "sm100", 189471, "nvlink"),
    Board("B300", "sm103", 275040, "nvlink", aliases=("B300 SXM6 AC", "B300 SXM6")),
    Board("H200", "sm90", 143771, "nvlink", aliases=("H200 SXM", "H200 NVL", "H200 141GB")),
    Board("H100", "sm90", 81559, "nvlink", aliases=("H100 80GB HBM3", "H100 SXM", "H100 80GB", "H100 PCIe")),
    Board("H100 NVL", "sm90", 95830, "nvlink"),
    Board("A100 80GB", "sm80", 81920, "nvlink", aliases=("A100 SXM4 80GB", "A100 80GB PCIe")),
    Board("L40S", "sm89", 46068),
    Board("RTX 4090", "sm89", 24564, aliases=("GeForce RTX 4090", "4090")),
)

_COUNT = re.compile(r"\s*(?P<count>\d+)\s*[xX*]\s*(?P<name>.+)")
_MOST_GPUS = 1024


def find(name: str) -> Board:
    """Return the board of a name; brand, case, spaces and dashes do not matter.

    :raises UnknownBoardError: nobody knows it; names the nearest.
    """
    wanted = _key(name)
    for board in BOARDS:
        if wanted in map(_key, (board.name, *board.aliases)):
            return board
    spellings = {_key(text): board.name for board in BOARDS for text in (board.name, *board.aliases)}
    near = dict.fromkeys(spellings[key] for key in difflib.get_close_matches(wanted, spellings, n=5, cutoff=0.5))
    known = ", ".join(near) or ", ".join(board.name for board in BOARDS)
    shown = name.strip() if re.fullmatch(r"[a-z][\w .-]*", name.strip(), re.IGNORECASE) else "NAME"
    raise UnknownBoardError(
        f"no board is called {name.strip()!r}",
        hint=f"{'Nearest' if near else 'Known'}: {known}. With its memory given any board will do: "
        f"--gpus '8x{shown}:97887MiB:sm120'.",
    )


def parse_gpus(text: str) -> tuple[int, Board]:
    """Read ``8x"RTX PRO 6000"``, ``8xB200``, ``RTX 5090`` or, for any other board, ``4xNAME:MIB:ARCH``.

    :return: number of GPUs, and their board.
    :raises UnknownBoardError: see :func:`find`; or the number is not in 1..1024.
    """
    match = _COUNT.fullmatch(text)
    count, name = (int(match["count"]), match["name"]) if match else (1, text)
    if not 1 <= count <= _MOST_GPUS:
        raise UnknownBoardError(f"{text!r} is no number of GPUs", hint="Write for example --gpus 8x'RTX PRO 6000'.")
    name = name.strip().strip("\"'").strip()
    return count, _described(name) or find(name)


def _described(text: str) -> Board | None:
    """Read ``NAME:97887MiB:sm120``; ``None`` when it is only a name."""
    match = re.fullmatch(
        r"(?P<name>[^:]+):\s*(?P<mib>\d{4,7})\s*(?:MiB)?\s*:\s*(?P<arch>sm_?\d{2,3})", text, re.IGNORECASE
    )
    if not match:
        return None
    arch = match["arch"].lower().replace("_", "")
    return Board(match["name"].strip(), arch, int(match["mib"]), source="given on the command line")


def _key(name: str) -> str:
    words = re.sub(r"[^a-z0-9]+", " ", name.lower()).split()
    return "".join(word for word in words if word != "nvidia")
