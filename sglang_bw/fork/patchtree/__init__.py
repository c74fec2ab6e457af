"""A scratch tree in which the patches of a series are written: one commit a patch, edited with one's own tools.

``open_tree`` lays the series out as commits, ``export`` writes the commits back as patch files. What was on disk when
they last agreed is remembered, so that an edit on either side is seen, and one on both sides is never overwritten
without being asked for. Nothing is thrown away that no patch file holds.
"""

from __future__ import annotations

from sglang_bw.fork.patchtree.target import Export, Target
from sglang_bw.fork.patchtree.tree import export, has_edits, open_tree, take_disk

__all__ = ["Export", "Target", "export", "has_edits", "open_tree", "take_disk"]
