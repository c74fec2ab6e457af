"""A small CUDA environment for a GPU machine without a registry: the engine's packages, one architecture, in parts.

    python scripts/thin_environment.py --arch sm90 --python 3.12 --out DIR [--measuring] [--also NAME=FOLDER ...]

Of the base's CUDA lock it leaves out what the engine does without (`WITHOUT`; the machine has CUDA's own libraries, as
every PyTorch installation does), files that are for building only, and the device code of every other architecture. On
0.5.23, Python 3.12 and sm90: 0.6 GB in eleven parts of 61 MB, where the bundle of a recipe has 2.5 GB. DIR holds the
parts and `unpack.sh`, for a machine with a Python of that version whose PyTorch has its CUDA libraries:

    sh unpack.sh INTO          # a minute; then: . INTO/env.sh; python ...

`--measuring` adds this checkout, the tool with its packages, and both engines; then, for instance:

    cd INTO/checkout; python scripts/gpu_experiment.py --engine-tree INTO/patched --out DIR

What was left out is missed where a flag asks for it: FlashAttention 3, FlashInfer, TileLang, DeepGEMM (`--with`).
"""

from __future__ import annotations

import argparse
import mmap
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import carried
import zstandard
from rich.console import Console

from sglang_bw.bundle.archive import PartWriter
from sglang_bw.fork import series
from sglang_bw.host import elf, fatbin
from sglang_bw.host.arch import capability

UNPACK = Path(__file__).resolve().parent / "unpack.sh"
LARGE = 4 << 20
LEVEL, WINDOW_LOG, PART = 9, 27, 61_000_000
# Not loaded by a server with Triton attention, or only where a flag asks for it.
WITHOUT = (
    r"flashinfer-.*|flash-attn-4|tilelang|z3-solver|quack-kernels|humming-kernels|sgl-deep-.*|torchcodec|datasets|pyarrow"
    r"|modelscope.*|llvmlite|numba|nvidia-cutlass-dsl-libs-cu12|nvidia-mathdx|nccl-extensions|nvshmem4py-cu13|cuda-toolkit"
    r"|vl-convert-python|nvidia-(cublas|cu(da|dnn-cu|fft|file|rand|solver|sparse).*|nvjitlink|nvshmem-.*|nvtx|nvvm)"
)
# In every package; for building and testing only.
FILES = (
    "**/*.a", "**/__pycache__", "scipy/**/tests", "pandas/tests", "nvidia/nccl/include", "torch/test",
    "triton/_C/libproton.so", "triton/backends/nvidia/lib/cupti*", "sgl_kernel/flash_ops*", "sgl_kernel/infllm_ops*",
)  # fmt: skip
console = Console(highlight=False)


def main() -> int:
    """Install, thin, pack."""
    options = parse()
    root = series.patches_root()
    base = options.base or series.newest_base(root)
    lock = root / base / "locks" / f"cuda-{options.python}-x86_64.txt"
    if not lock.exists():
        console.print(f"error: {base} has no CUDA lock for Python {options.python}: {lock.name}", style="red")
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.out) as scratch:
        site = Path(scratch) / "site"
        locks = [lock.read_text()]
        if options.measuring:
            locks.append(carried.tool_lock(wanted(locks[0], "", []), options.python, Path(scratch)))
        without = "|".join((WITHOUT, *options.without))
        names = list(dict.fromkeys(name for text in locks for name in wanted(text, without, options.include)))
        console.print(f"installing {len(names)} packages")
        install(names, site, options.python, Path(scratch))
        saved = drop(site) + sum(thin(path, options.arch) for path in libraries(site))
        console.print(f"{saved / 1e9:.1f} GB left out; packing")
        folders = {"site": site, **dict(options.also)}
        if options.measuring:
            carried.tool(site)
            folders["checkout"] = carried.checkout(Path(scratch) / "checkout")
            folders |= carried.engines(series.Series.load(root, base), options.python, Path(scratch))
        parts = list(pack(folders, options.out))
        carry_decompressor(site, options.out)
    (options.out / "python").write_text(options.python + "\n")
    shutil.copy(UNPACK, options.out)
    size = sum(path.stat().st_size for path in parts)
    console.print(f"{len(parts)} parts, {size / 1e9:.2f} GB, in {options.out}")
    return 0


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", help="upstream version, default the newest with a series")
    parser.add_argument("--arch", type=_arch, default="sm120", help="kernels of this architecture are kept (sm120)")
    parser.add_argument("--python", default="3.12", help="of the GPU machine (3.12)")
    parser.add_argument("--out", type=Path, required=True, help="folder for the parts")
    parser.add_argument("--without", nargs="*", default=[], metavar="REGEX", help="packages to leave out, too")
    parser.add_argument("--with", dest="include", nargs="*", default=[], metavar="NAME", help="packages to keep")
    parser.add_argument("--measuring", action="store_true", help="add the checkout, the tool and both engines")
    parser.add_argument(
        "--also", nargs="*", type=_folder, default=[], metavar="NAME=FOLDER", help="folders to pack beside it"
    )
    return parser.parse_args()


def _arch(word: str) -> tuple[int, int]:
    try:
        return capability(word)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{word!r} is no architecture such as sm120") from error


def _folder(word: str) -> tuple[str, Path]:
    name, _, folder = word.partition("=")
    return name, Path(folder)


def wanted(lock: str, without: str, include: list[str]) -> Iterator[str]:
    """Yield the pinned requirements of a lock, without its hashes, that are not left out."""
    for name, version in re.findall(r"^([a-z0-9][\w.-]*)==([^\s;\\]+)", lock, re.MULTILINE):
        if name in include or not re.fullmatch(without, name):
            yield f"{name}=={version}"


def install(names: list[str], site: Path, python: str, scratch: Path) -> None:
    """Install wheels for another Python into a folder."""
    (scratch / "requirements.txt").write_text("\n".join(names) + "\n")
    command = [
        *(*carried.UV, "install", "--quiet", "--no-deps", "--only-binary", ":all:"),
        *("--target", str(site), "--python-version", python, "--python-platform", carried.PLATFORM),
        *("--link-mode", "copy", "--requirements", str(scratch / "requirements.txt")),
    ]
    subprocess.run(command, check=True)


def drop(site: Path) -> int:
    """Remove what is for building and testing only; return its bytes."""
    found = [path for pattern in FILES for path in site.glob(pattern)]
    saved = 0
    for path in found:
        if path.is_dir():
            saved += sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            shutil.rmtree(path)
        elif path.exists():
            saved += path.stat().st_size
            path.unlink()
    return saved


def libraries(site: Path) -> list[Path]:
    """Return large shared objects."""
    found = (path for path in site.rglob("*.so*") if path.is_file() and not path.is_symlink())
    return sorted(path for path in found if path.stat().st_size > LARGE)


def thin(path: Path, gpu: tuple[int, int]) -> int:
    """Overwrite device code with zeros where the same container has code that this GPU runs; return its bytes.

    Headers stay, so that what is left is found where it was. A container without machine code for the GPU keeps its
    PTX, and one without either is left as it is.
    """
    with elf.opened(path) as opened:
        found = list(fatbin.of(opened))
    saved = 0
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        for entries in found:
            runs = [entry for entry in entries if entry.target.runs_on(gpu)]
            keep = [entry for entry in runs if entry.target.kind == "sass"] or runs
            for entry in entries if keep else []:
                if entry not in keep:
                    data[entry.start : entry.start + entry.size] = bytes(entry.size)
                    saved += entry.size
    return saved


def pack(folders: dict[str, Path], out: Path, size: int = PART) -> list[Path]:
    """Write folders as one compressed archive in parts."""
    settings = zstandard.ZstdCompressionParameters.from_level(LEVEL, window_log=WINDOW_LOG, threads=-1)
    compressor = zstandard.ZstdCompressor(compression_params=settings)
    with PartWriter(out, "part", size) as parts:
        with (
            compressor.stream_writer(parts, closefd=False) as stream,
            tarfile.open(fileobj=stream, mode="w|") as archive,
        ):  # type: ignore[arg-type]
            for name, folder in folders.items():
                archive.add(folder, name)
        parts.finish()
        return [out / part.file for part in parts.parts]


def carry_decompressor(site: Path, out: Path) -> None:
    """Put what unpacks the parts beside them: few machines have it."""
    target = out / "zstandard"
    target.mkdir(exist_ok=True)
    for path in [site / "zstandard" / "__init__.py", *site.glob("zstandard/backend_c*.so")]:
        shutil.copy(path, target)


if __name__ == "__main__":
    sys.exit(main())
