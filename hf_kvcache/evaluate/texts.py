"""Texts that come with every Python, so that figures can be compared without a download."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable
from pathlib import Path

DOCSTRING_MODULES = (
    "argparse calendar codecs configparser contextlib copy csv dataclasses datetime difflib doctest enum fractions "
    "functools heapq inspect ipaddress mailbox optparse os pathlib pickle pickletools random shutil smtplib socket "
    "socketserver statistics string subprocess tarfile tempfile textwrap threading timeit traceback typing zipfile "
    "_pydatetime _pydecimal _pyio"
).split()


def topics() -> str:
    """The language reference that comes with Python: `pydoc_data.topics`, entries in sorted order."""
    from pydoc_data.topics import topics as entries

    return "\n\n".join(entries[key] for key in sorted(entries))


def docstrings() -> str:
    """All docstrings of some modules of the standard library, in the order of their sources."""
    parts: list[str] = []
    for name in DOCSTRING_MODULES:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):  # not in this version
            continue
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
        parts += [text for text in found if text]
    return "\n\n".join(parts)


# They differ a little between Python versions, which is why results name theirs.
TEXTS: dict[str, Callable[[], str]] = {"topics": topics, "docstrings": docstrings}


def read(name: str) -> str:
    """The text of this name, or of the file of this name. Raises `ValueError` where there is neither."""
    if name in TEXTS:
        return TEXTS[name]()
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{name!r} is neither a text that can be read ({error}) nor one of {', '.join(TEXTS)}"
        ) from error
