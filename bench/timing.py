"""A clock that waits for the GPU, and one JSON line per measurement."""

import gc
import json
import time
import traceback

import torch

from distributed.disk import is_first_rank
from run.log import describe_device

synchronize = torch.cuda.synchronize if torch.cuda.is_available() else int


def timed(function):
    """-> seconds until the GPU has finished, value of function()"""
    synchronize()
    start = time.perf_counter()
    value = function()
    synchronize()
    return time.perf_counter() - start, value


def report(facts, function, *args):
    """Print on rank 0 a line of facts, the dict that function(*args) returns, torch's peak
    allocation in GiB and the device. What fails, mostly for want of memory, becomes a line with
    "error". -> the dict
    """
    gc.collect()
    torch.cuda.empty_cache()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    try:
        found = function(*args)
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}"[:300]}
    if is_first_rank():
        print(json.dumps(facts | found | {"device": describe_device()}), flush=True)
    return found
