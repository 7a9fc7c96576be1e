"""How every command starts. Imported before torch, which takes seconds: Ctrl-C may come then."""

import json
import os
import signal
import sys
import time

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # waiting threads give up their core


def hook(kind, *error):
    """Ctrl-C ends a command with status 130, as ever, but without a traceback."""
    if kind is not KeyboardInterrupt:
        sys.__excepthook__(kind, *error)


sys.excepthook = hook


def start(main, arguments, *given):
    """main(arguments.parse(*given)). An error is told by the first rank, and again by torchrun's
    report; by others only if the first one goes on: torchrun ends them while they wait.
    """
    try:
        main(arguments.parse(*given))
    except BaseException as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(10)  # a head start for the first rank
        if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            facts = {"py_callstack": str(error), "timestamp": int(time.time())}
            with open(report, "w") as file:
                json.dump({"message": {"message": "", "extraInfo": facts}}, file)
        raise
    finally:
        # a thread of gloo that lets go of a tensor while Python ends would abort the process
        time.sleep(0.1)
