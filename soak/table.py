"""The table of a soak script: every check, how often it was tried, what survived."""

import multiprocessing
import sys
import tempfile
import time
import traceback
from pathlib import Path


def run(checks):
    """checks: [(name, generator function, its arguments behind a folder, ...)]. The function yields
    after each fault that was survived and raises at the first that was not. Words on the command
    line choose checks whose name has one of them. -> exit status
    """
    words, chosen, failed = sys.argv[1:], 0, False
    print(f"{'check':44} {'tried':>6} {'survived':>8} {'seconds':>8}", flush=True)
    for name, check, *arguments in checks:
        if words and not any(word in name for word in words):
            continue
        chosen, tried, survived, start = chosen + 1, 0, 0, time.perf_counter()
        try:
            with tempfile.TemporaryDirectory() as folder:
                for _ in check(Path(folder), *arguments):
                    tried, survived = tried + 1, survived + 1
        except KeyboardInterrupt:
            raise
        except BaseException:  # a SystemExit too, and pytest's failures
            traceback.print_exc()
            tried, failed = tried + 1, True
        for child in multiprocessing.active_children():
            child.kill()
        seconds = time.perf_counter() - start
        print(f"{name:44} {tried:6} {survived:8} {seconds:8.0f}", flush=True)
        failed |= not tried
    return int(failed or not chosen)
