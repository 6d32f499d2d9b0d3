"""Which video rows a draft sees: scores, budgets and named strategies, as pure functions on arrays.

Everything here can change the draft's guesses only, never the target's text (docs/methods.md).
"""

from .pruned_prompt import cell_rows, grid_checksum, kept_of_prompt, pruned
from .strategies import STRATEGIES, Strategy, find_strategy, kept_rows
from .text_queries import MOST_ROWS, RelevanceLaw, TextQueries

__all__ = [
    "MOST_ROWS",
    "STRATEGIES",
    "RelevanceLaw",
    "Strategy",
    "TextQueries",
    "cell_rows",
    "find_strategy",
    "grid_checksum",
    "kept_of_prompt",
    "kept_rows",
    "pruned",
]
