"""The fork server of GrammarChecker: has imported llguidance and forks a child to compile each grammar.

Started as `python -m vidspec_service.api.grammars.fork_server FD PARENT_PID`. Starting an interpreter and importing
llguidance takes 0.1 s of a core, which would slow the streams of small models; here it is done once. On some inputs
the compiler takes minutes or ends its process, so a child has one second and its own memory. A child reads from its
channel the form of a grammar, a line break and the grammar. It writes there the grammar as workers read it and what is
wrong with it.
"""

from __future__ import annotations

import json
import os
import re
import resource
import socket
import sys
from functools import partial
from typing import NoReturn, cast

from llguidance import GrammarFormat, LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from vidspec_service.forking import MOST_OOM_SCORE, give_way, serve_forks, tie_to_parent

DONE = b"\n"  # after the result: without it, the child has not come to the end
_MAX_CPU_S = 1  # a grammar that compiles within it takes a worker no longer
# What may have "<[" in Lark without naming tokens by their numbers: strings, comments and patterns.
_LITERAL = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\])+/')
# Among bytes that are no text, llguidance's masks have special tokens, which it then does not take.
_ANY_BYTES = re.compile(r'%llguidance\s*\{[^}]*"allow_invalid_utf8"\s*:\s*true')
_NO_TOKEN = "NoExtension"  # llguidance's stop reason if it allows no token
_MAX_BYTES = 2 * 1024**3


def main(requests_fd: int, parent_pid: int) -> None:
    """Serve one GrammarChecker."""
    tie_to_parent(parent_pid)
    give_way(MOST_OOM_SCORE)  # a grammar that fills the memory must not cost a worker
    tokenizer = LLTokenizer("byte")  # a token for each byte: what a grammar allows does not depend on the model
    grammar_error('start: "a"', tokenizer)  # pays the cost of a first compilation, which the first grammar would pay
    serve_forks(requests_fd, partial(_check_one, tokenizer))


def _check_one(tokenizer: LLTokenizer, channel_fd: int) -> NoReturn:
    """Try one grammar. The process ends by a signal if that takes more time or memory than it may."""
    try:
        # Where both limits are the same, the kernel ends the process as it does when memory runs out.
        resource.setrlimit(resource.RLIMIT_CPU, (_MAX_CPU_S, _MAX_CPU_S + 1))
        resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        channel = socket.socket(fileno=channel_fd)
        with channel.makefile("rb") as request:
            form, _, grammar = request.read().decode().partition("\n")
        result = compile_grammar(cast(GrammarFormat, form), grammar, tokenizer)
        channel.sendall(json.dumps(result).encode() + DONE)
    finally:
        os._exit(0)  # at once: an interpreter that tidies up takes longer than most grammars


def compile_grammar(form: GrammarFormat, grammar: str, tokenizer: LLTokenizer) -> tuple[str, str]:
    """The grammar as workers read it, and what is wrong with it; empty if nothing is."""
    try:
        text = grammar_from(form, grammar)
    except ValueError as error:
        return "", str(error)
    if form == "grammar" and (unfit := _unfit_in(text)):
        return "", unfit
    return text, grammar_error(text, tokenizer)


def _unfit_in(lark: str) -> str:
    """What a client's grammar has that llguidance goes wrong with; empty if nothing."""
    # Other numbers are meant than those of the trial's tokens; and llguidance takes such a token back wrongly.
    if "<[" in _LITERAL.sub("", lark):
        return "it may not name tokens by their numbers, as <[...]> does"
    if _ANY_BYTES.search(_LITERAL.sub(lambda found: found[0] if found[0][0] == '"' else "", lark)):
        return "it may not allow_invalid_utf8"
    return ""


def grammar_error(grammar: str, tokenizer: LLTokenizer) -> str:
    """What is wrong with a grammar in llguidance's own form; empty if nothing is."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
    if not matcher.is_error():
        matcher.compute_bitmask()  # looks for a first token; sets the error if there is none
    message = matcher.get_error()
    return "no answer can match it" if _NO_TOKEN in message else message


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
