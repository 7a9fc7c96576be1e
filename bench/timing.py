"""A clock that waits for the GPU, and a report of one JSON line per measurement."""

import gc
import json
import os
import time
import traceback

import torch


def timed(function):
    """-> seconds until the GPU has finished, value of function()"""
    synchronize()
    start = time.perf_counter()
    value = function()
    synchronize()
    return time.perf_counter() - start, value


def synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Report:
    """Prints JSON lines on rank 0. A failed measurement becomes a line with "error"."""

    def __init__(self, **facts):
        """facts: fields of every line, such as the model"""
        self.facts, self.failed = facts, False
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        self.write({"gpu": gpu, "torch": torch.__version__})

    def measure(self, function, *args, **facts):
        """Write `facts`, the dict that function(*args) returns, and its peak GPU memory in GiB. ->
        that dict
        """
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            result = function(*args)
            if torch.cuda.is_available():
                result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        except (Exception, SystemExit) as error:  # mostly out of memory: go on with the others
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"[:300]}
            self.failed = True
        self.write(facts | result)
        return result

    def write(self, line):
        if int(os.environ.get("RANK", 0)):
            return
        line = self.facts | line
        rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in line.items()}
        print(json.dumps(rounded), flush=True)

    def close(self):
        if self.failed:
            raise SystemExit("a measurement failed, see above")
