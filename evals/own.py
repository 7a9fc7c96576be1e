"""Files of a user: --task path.py, --reward path.py:function. Whatever they raise, and an exit or a
hang, ends in one line.
"""

import faulthandler
import sys
from concurrent.futures import Future
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from threading import Thread
from traceback import walk_tb

SECONDS = 60.0  # that a score or a reward may take for one completion
FAILED = []  # what --reward-errors has counted since this list was emptied


class Failed(SystemExit):
    """A function of a user gives no value."""


def guarded(file, function, seconds=None, instead=None):
    """The function. Where it raises, exits or takes more seconds: `instead`; if that is None,
    Failed, with the last line of the file that was reached, and the arguments. A SystemExit with a
    text speaks for itself.

    With a limit it works in a thread, which is left behind. Where that lets no other thread run, as
    a regular expression can, Python says where it is, and ends.
    """

    def call(*arguments, **options):
        future = Future()

        def work():
            try:
                future.set_result(function(*arguments, **options))
            except BaseException as error:
                future.set_exception(error)

        if seconds:
            faulthandler.dump_traceback_later(3 * seconds, exit=True, file=2)
            Thread(target=work, daemon=True).start()
        else:
            work()
        try:
            return future.result(seconds)
        except (Exception, SystemExit) as error:
            if isinstance(error, SystemExit) and isinstance(error.code, str):
                raise
            place = file
            for frame, line in walk_tb(error.__traceback__):
                if frame.f_code.co_filename == file:
                    place = f"{file} line {line}"
            what = f"{error!r:.200}" if future.done() else f"no value in {seconds:g} s"
            said = "; ".join([place, what, *(f"{a!r:.200}" for a in arguments)])
            if instead is None:
                raise Failed(said) from error
            FAILED.append(said)
            if said is FAILED[0]:
                print(f"counted as {instead:g}: {said}", file=sys.stderr)
            return instead
        finally:
            faulthandler.cancel_dump_traceback_later()

    return call


def load_file(path, functions):
    """A Python file, anywhere, as a module. SystemExit says which of the `functions` it lacks, or
    what is wrong with it.
    """
    if not Path(path).is_file():
        raise SystemExit(f"{path}: no such file")
    spec = spec_from_file_location(Path(path).stem, path)
    module = module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)  # where dataclasses look for it
    guarded(path, lambda: spec.loader.exec_module(module))()
    if missing := [name for name in functions if not hasattr(module, name)]:
        raise SystemExit(f"{path}: needs a function {missing[0]}")
    return module
