"""The template process: it reads the tokenizer, and forks a child for each schema.

Its standard input is a connection to the server, which sends settings and the tokenizer
as JSON. The process answers "ready" or an error text. Then each message is a command:

    fork    fork a child. The descriptor of the child's connection follows; the answer
            is the child's process id
    pid     end the child of that process id; the answer is the child's wait status

A child answers its schema with the first mask, then each step with a mask. A step is a
JSON list: how many tokens to roll back, then the tokens to append. SIGALRM ends a child
that computes for too long, even if llguidance holds the interpreter's lock.
"""

import json
import os
import resource
import signal
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import Any

FORK = b"fork"
OUT_OF_MEMORY = 3  # the exit status of a child
WATCH_SECONDS = 0.05
NICE = 10
MASK, FAILED, UNUSABLE, NOT_ENFORCED = b"m", b"f", b"u", b"w"
LARK = "lark:"  # prefix of a grammar; a text without it is a JSON schema
# Small models may write whitespace without end if it is allowed.
COMPACT: Any = {"whitespace_flexible": False}


def _serve_schema(channel: Connection, tokens: Any, limits: dict[str, float]) -> None:
    from llguidance import LLMatcher, LLParserLimits

    schema = channel.recv_bytes().decode()
    signal.setitimer(signal.ITIMER_REAL, limits["schema_seconds"])
    if schema.startswith(LARK):
        grammar = LLMatcher.grammar_from_lark(schema.removeprefix(LARK))
    else:
        grammar = LLMatcher.grammar_from_json_schema(schema, overrides=COMPACT)
    most = LLParserLimits(verbose_errors=False)
    matcher = LLMatcher(tokens, grammar, log_level=0, limits=most)
    if matcher.is_error():
        answer = UNUSABLE + str(matcher.get_error()).encode()
    elif warnings := matcher.get_grammar_warnings():
        answer = NOT_ENFORCED + "; ".join(warnings).encode()
    else:
        first = matcher.deep_copy()
        answer = _mask(matcher)
    signal.setitimer(signal.ITIMER_REAL, 0)
    channel.send_bytes(answer)
    spare = limits["mask_seconds"]  # for all steps together, beyond `step_seconds` each
    while True:
        back, *added = json.loads(channel.recv_bytes())
        signal.setitimer(signal.ITIMER_REAL, limits["step_seconds"] + spare)
        matcher.rollback(back)
        matcher.consume_tokens(added)
        answer = _mask(matcher)
        if matcher.is_error():  # it cannot be used any more
            matcher = first.deep_copy()
        left, _ = signal.setitimer(signal.ITIMER_REAL, 0)
        spare = min(spare, left)
        channel.send_bytes(answer)


def _mask(matcher: Any) -> bytes:
    """Return whether the text may end, and a bit for each token id; or an error."""
    bits = matcher.compute_bitmask()
    if matcher.is_error():  # this call or an earlier one has failed
        return FAILED + str(matcher.get_error()).encode()
    return MASK + bytes([matcher.is_accepting()]) + bytes(bits)


def _limit_memory(most: int) -> None:
    """End this process once it holds `most` bytes more than now."""
    unit = 1 if sys.platform == "darwin" else 1024
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def watch() -> None:
        while resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit - before < most:
            time.sleep(WATCH_SECONDS)
        os._exit(OUT_OF_MEMORY)

    threading.Thread(target=watch, daemon=True).start()
    if sys.platform == "linux":  # for growth between checks; macOS has no such limit
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
        # Address space exceeds memory: threads and allocators reserve some.
        space = pages * resource.getpagesize() + 2 * most + (256 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (space, space))


def _child(descriptor: int, tokens: Any, limits: dict[str, Any]) -> None:
    """Run a child, then exit without the template's cleanup."""
    status = 1
    try:
        _limit_memory(limits["schema_megabytes"] << 20)
        _serve_schema(Connection(descriptor), tokens, limits)
    except (EOFError, ConnectionError):
        status = 0
    except MemoryError:
        status = OUT_OF_MEMORY
    finally:
        os._exit(status)


def main() -> None:
    """Read the tokenizer, then execute commands until the connection is closed."""
    import llguidance  # here, so that the server can import this module

    os.nice(NICE)
    control = Connection(sys.stdin.fileno())
    settings = json.loads(control.recv_bytes())
    vocabulary, end = settings.pop("tokenizer"), settings["end"]
    try:
        tokens = llguidance.LLTokenizer(vocabulary, eos_token=end)
    except ValueError as error:
        control.send_bytes(str(error).encode())
        return
    control.send_bytes(b"ready")
    del vocabulary
    with suppress(EOFError, ConnectionError):
        while True:
            command = control.recv_bytes()
            if command == FORK:
                descriptor = recv_handle(control)
                if (answer := os.fork()) == 0:
                    control.close()
                    _child(descriptor, tokens, settings["limits"])
                os.close(descriptor)
            else:
                # An ended child keeps its id until `waitpid`.
                os.kill(int(command), signal.SIGKILL)
                answer = os.waitpid(int(command), 0)[1]
            control.send_bytes(b"%d" % answer)
    os.killpg(0, signal.SIGKILL)  # ends all children and this process


if __name__ == "__main__":
    main()
