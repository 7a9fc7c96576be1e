"""Where `python evals/<task>.py` begins: the repository replaces this folder on the path."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])
from evals.run import main  # noqa: F401
