"""One self-contained HTML page about comparisons."""
