# make demo: RL that visibly works, on CPU, in a few minutes.  make test: the tests.  make test-gpu: those of a GPU's kernels.
# Each makes .venv first.
PYTHON ?= python3
VENV ?= .venv
MODEL ?= tiny-sdar
RUN = $(VENV)/bin/python

demo: $(VENV)/installed
	$(RUN) algos/bgpo.py --model $(MODEL)

# Two workers; the tests of a file stay in one of them, because they share what its fixtures make.
test: $(VENV)/installed
	$(RUN) -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder tests
	@$(RUN) tests/size.py

test-all: $(VENV)/installed
	$(RUN) -m pytest -q tests --all

test-gpu: $(VENV)/installed
	$(RUN) -m pytest -q -m cuda tests

$(VENV)/installed: requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install -q --disable-pip-version-check -r requirements.txt
	touch $@

.PHONY: demo test test-all test-gpu
