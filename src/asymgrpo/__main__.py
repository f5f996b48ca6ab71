"""The command `asymgrpo`: says which extra is missing where the objective alone is installed."""

from __future__ import annotations

import re
import sys
from importlib import metadata

_DISTRIBUTION = {"yaml": "pyyaml"}
"""Where a module is not named as its package is."""


def extra_with(module: str) -> str | None:
    """The extra of this package that brings a module, from the package's own metadata.

    >>> extra_with("trl.trainer"), extra_with("yaml"), extra_with("reasoning_gym")
    ('train', 'report', 'gym')
    >>> extra_with("somebody_elses") is None
    True
    """
    top = module.partition(".")[0]
    wanted = _DISTRIBUTION.get(top, top).replace("_", "-").lower()
    for line in metadata.requires("asymgrpo") or []:
        found = re.match(r"""([\w.-]+).*;.*extra == ['"]([\w-]+)['"]""", line)
        if found and found[1].lower() == wanted:
            return found[2]
    return None


def main() -> None:
    """Run a command; one whose packages are not installed is one line and exit code 2."""
    try:
        from asymgrpo import cli

        cli.main()
    except ModuleNotFoundError as error:
        extra = extra_with(error.name or "")
        if extra is None:
            raise
        reading = ", or 'asymgrpo[report]' to read runs only" if extra == "report" else ""
        wanted = "train" if extra == "report" else extra
        print(
            f"asymgrpo: this needs {error.name}: pip install 'asymgrpo[{wanted}]'{reading}",
            file=sys.stderr,
        )
        sys.exit(2)


if __name__ == "__main__":
    main()
