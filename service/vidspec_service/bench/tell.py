"""Tell: how a measurement says where it stands; who draws that is the caller's business."""

from __future__ import annotations

from collections.abc import Callable

Tell = Callable[[str, int, int], None]  # what is going on, parts done, parts in all (0: unknown)
