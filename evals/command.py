"""Where `python evals/<task>.py` begins: the repository replaces this folder on the path."""
# ruff: noqa: F401

import sys

sys.path[0] = __file__.rpartition("/evals/")[0]
import distributed.start  # isort: skip
from evals.run import main
