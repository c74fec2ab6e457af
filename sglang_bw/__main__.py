"""Allow ``python -m sglang_bw``."""

from sglang_bw.cli import main

main()
