"""What the workers' environment has besides the notebook's: `--env`, `--env-file`, `--debug`.

Runs in the notebook.  A `.env` file is parsed, never sourced: nothing in it is run or
expanded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from nbdist.errors import UsageError, one_line
from nbdist.wire.environ import NBDIST_DECIDES

DEBUG_VARIABLES: Mapping[str, str] = {
    "CUDA_LAUNCH_BLOCKING": "1",
    "NCCL_DESYNC_DEBUG": "1",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "TORCH_SHOW_CPP_STACKTRACES": "1",
    "PYTHONFAULTHANDLER": "1",
}
"""torchx's `--debug`; the last is for processes that a worker starts, it has its own."""

READ_AT_START = re.compile(
    r"(LD|MALLOC|KMP|GOMP|MKL|OPENBLAS|GLIBC)_.*|PYTHON(?!_EXEC|FAULTHANDLER|PATH).*"
    r"|TORCH_(LOGS|LOGS_.*|CPP_LOG_LEVEL|SHOW_CPP_STACKTRACES)"
)
"""What an interpreter, or a library on import, reads once: too late for a fork of either."""

SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
"""In the names of variables whose values are not shown."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PATTERN = re.compile(r"[A-Za-z0-9_*?\[\]!-]+")
_LINE = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(.*)")
_COMMENT = re.compile(r"\s+#.*|^#.*")
_SINGLE = re.compile(r"'([^']*)'(.*)")
_DOUBLE = re.compile(r'"((?:[^"\\]|\\.)*)"(.*)')
_ESCAPE = re.compile(r"\\(.)")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r"}


def parse_pairs(texts: Iterable[str]) -> dict[str, str]:
    """The values of `--env`, each `NAME=VALUE`."""
    found = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or not _NAME.fullmatch(name):
            raise UsageError(f"`--env {name}`: a name and its value, such as `--env SEED=1`.")
        quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
        found[name] = value[1:-1] if quoted else value
    return found


def check_names(environ: Mapping[str, str], option: str) -> None:
    """UsageError for what cannot be set."""
    for name, value in environ.items():
        if name in NBDIST_DECIDES:
            raise UsageError(
                f"`{option}`: {name} tells a worker who it is, and cannot be set. "
                "`-n`, `-j`, `--pool` and `--name` decide it."
            )
        if not _NAME.fullmatch(name) or "\0" in value:
            raise UsageError(f"`{option}`: {name!r} and its value cannot be in an environment.")


def parse_patterns(text: str) -> tuple[str, ...]:
    """The value of `--copy-env`: names with `*` and `?`, with commas between."""
    patterns = tuple(part.strip() for part in text.split(",") if part.strip())
    for pattern in patterns:
        if not _PATTERN.fullmatch(pattern):
            raise UsageError(
                f"`--copy-env {text}`: `{pattern}` is no pattern of names; such as `HF_*,WANDB_*`."
            )
    return patterns


def read_env_file(path: str) -> dict[str, str]:
    """What a `.env` file sets; UsageError with file and line for what cannot be read."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"`--env-file {path}`: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UsageError(f"`--env-file {path}`: it is not a text in UTF-8.") from None
    found = {}
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            found.update(parse_line(line.strip()))
        except ValueError as why:
            shown = one_line(line, 40).partition("=")[0]  # what follows may be a secret
            raise UsageError(
                f"{path}, line {number} (`{shown}`): {why}. Lines are NAME=value, "
                "NAME='value', export NAME=value, or # comments."
            ) from None
    check_names(found, f"--env-file {path}")
    return found


def parse_line(line: str) -> dict[str, str]:
    """The variable that one line of a `.env` file sets, or none; ValueError with the reason."""
    if not line or line.startswith("#"):
        return {}
    found = _LINE.fullmatch(line)
    if not found:
        raise ValueError("that is no NAME=value")
    return {found[1]: _value(found[2])}


def _value(text: str) -> str:
    if not text.startswith(("'", '"')):
        return _COMMENT.sub("", text).rstrip()
    is_single = text[0] == "'"
    quoted = (_SINGLE if is_single else _DOUBLE).fullmatch(text)
    if not quoted:
        raise ValueError("a quote is not closed")
    if quoted[2].strip() and not _COMMENT.fullmatch(quoted[2]):
        raise ValueError("something follows the closing quote")
    if is_single:
        return quoted[1]
    return _ESCAPE.sub(lambda found: _ESCAPED.get(found[1], found[1]), quoted[1])
