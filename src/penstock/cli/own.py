"""`penstock --import MODULE ...`: code of a user's own, which registers what a configuration may name."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from penstock.config import ConfigError

KEY = "--import"


def own_modules(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the modules that a command line asks for, and its other words.

    Words behind `--` belong to another program.
    """
    end = given.index("--") if "--" in given else len(given)
    modules, others = [], []
    words = iter(given[:end])
    for word in words:
        option, assigned, value = word.partition("=")
        if option == KEY:
            modules.append(value if assigned else next(words, ""))
        else:
            others.append(word)
    return modules, [*others, *given[end:]]


def import_own(modules: Sequence[str]) -> int:
    """Import modules of this folder, or installed ones; return the exit code of a command that succeeds.

    Raises:
        ConfigError: There is no such module, or it cannot be imported; the error names the line.
    """
    if modules and (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # the command of an installed package looks only where packages are
    for name in modules:
        try:
            import_module(name)
        except (Exception, SystemExit) as error:  # whatever a user's own code raises
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            if not name or (missing and f"{name}.".startswith(f"{missing}.")):
                why = "is no module of this folder, nor an installed one"
                hint = "Give its dotted name: my_schedules for my_schedules.py."
                raise ConfigError(KEY, name, why, hint) from None
            why = f"{type(error).__name__}: {error}"
            if not isinstance(error, SyntaxError):  # which says where it is
                place = traceback.extract_tb(error.__traceback__)[-1]
                why += f" ({place.filename}, line {place.lineno})"
            raise ConfigError(KEY, name, why, "Mend the module, or leave it out.") from error
    return 0
