"""What a run is made of: its flags, problems, steps, record, saves and plan."""
# ruff: noqa: F401

from run.directory import Run
from run.flags import RolloutFlags, RunFlags
from run.problems import HeldOut, Problems
