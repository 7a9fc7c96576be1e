"""Where `python evals/<task>.py` begins: the repository replaces this folder on the path."""

import sys

sys.path[0] = __file__.rpartition("/evals/")[0]
from evals.run import main  # noqa: F401
