"""Imported by the script of `python evals/<task>.py`, this runs it: the repository replaces that
folder on the path, and evals/run.py does the rest."""
# ruff: noqa: F401

import sys
from pathlib import Path

sys.path[0] = __file__.rpartition("/evals/")[0]
import distributed.start  # isort: skip
from evals.run import main

main(Path(sys.argv[0]).stem)
