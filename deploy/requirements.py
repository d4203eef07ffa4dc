"""Print what Warmlane needs, one a line: ``requirements.py [EXTRA]``.

Images install this before they copy the source, so that a change of code rebuilds no dependency.
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
extras = (project["optional-dependencies"][extra] for extra in sys.argv[1:])
print(*project["dependencies"], *(line for extra in extras for line in extra), sep="\n")
