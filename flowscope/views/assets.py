"""The files of web/: served one by one to the tab, or joined into one script for the report.

There is no build step. The modules import each other by name and share nothing else, so joining them is: order by
import, drop the `import` lines and the word `export`. For that they keep to two rules, which a test checks: an import
stands on one line, and no two modules use one top-level name.
"""

from __future__ import annotations

import re
from importlib.resources import files

SCRIPTS = "text/javascript"
STYLES = "text/css"

_IMPORT = re.compile(r'^import \{[^}\n]*\} from "\./([a-z_]+\.js)";\n', re.MULTILINE)


def served() -> dict[str, str]:
    """Name -> media type of every file of web/. Requests are answered from this list, never from a path."""
    types = {".js": SCRIPTS, ".css": STYLES}
    found = (entry.name for entry in (files("flowscope.views") / "web").iterdir())
    return {name: types[suffix] for name in sorted(found) for suffix in types if name.endswith(suffix)}


def read(name: str) -> str:
    """The text of a file of web/."""
    return (files("flowscope.views") / "web" / name).read_text(encoding="utf-8")


def joined(entry: str) -> str:
    """The module `entry` with all it imports, as one script."""
    parts: dict[str, str] = {}

    def add(name: str) -> None:
        text = read(name)
        for imported in _IMPORT.findall(text):
            if imported not in parts:
                add(imported)
        parts[name] = f"// {name}\n" + re.sub(r"^export ", "", _IMPORT.sub("", text), flags=re.MULTILINE)

    add(entry)
    return "\n".join(parts.values())
