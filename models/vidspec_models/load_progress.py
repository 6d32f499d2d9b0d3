"""How far a model's download and loading have come: the libraries' own progress bars, told instead of drawn."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import transformers
from tqdm import tqdm

OnProgress = Callable[[str, float | None], None]  # what is going on; the share that is done, None if nobody knows


def told_bar(tell: OnProgress) -> type[tqdm]:
    """A bar that calls `tell` a few times a second where another would draw itself, from any thread."""

    class ToldBar(tqdm):  # type: ignore[misc]  # tqdm has no types
        monitor_interval = 0  # no thread that wakes bars which stand still

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": False, "file": io.StringIO()})

        def display(self, msg: str | None = None, pos: int | None = None) -> bool:
            if self.total:
                tell(str(self.desc).rstrip(": ").lower(), min(self.n / self.total, 1.0))
            return True

    return ToldBar


@contextmanager
def load_bars(tell: OnProgress) -> Iterator[type[tqdm]]:
    """Inside, transformers' bars are told; the class is for downloads, which take one."""
    bar = told_bar(tell)
    previous = transformers.utils.logging.set_tqdm_hook(lambda _, args, kwargs: bar(*args, **kwargs))
    try:
        yield bar
    finally:
        transformers.utils.logging.set_tqdm_hook(previous)
