"""The process that compiles a client's grammar first: it may take too long, or break the compiler, without harm.

Run as `python -m vidspec_service.api.grammars.child`: the grammar on stdin, what is wrong with it on stdout.
"""

from __future__ import annotations

import resource
import sys

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MOST_CPU_S = 1  # what compiles in less takes a worker as little
_NO_WAY = "NoExtension"  # llguidance's word for it
_MOST_BYTES = 2 * 1024**3


def main() -> None:
    """Ends by a signal if the grammar needs more time or memory than any should."""
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU_S, MOST_CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.stdout.write(fault(sys.stdin.buffer.read().decode()))


def fault(grammar: str) -> str:
    """What is wrong with it; empty if nothing is. With one token for each byte: what it allows hangs on no model."""
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
    can_begin = not matcher.is_error() and any(matcher.compute_bitmask())
    message = matcher.get_error()
    return "" if can_begin else "there is no answer of this form" if _NO_WAY in message else message


if __name__ == "__main__":
    main()
