# make demo: RL that visibly works, on CPU, in a few minutes.  make test: the tests.  make test-gpu: those of a GPU's kernels.
# make speedrun: an autoregressive model becomes a reinforced diffusion model, on a GPU (docs/real.md).
# Each makes .venv first and says where it is.
PYTHON ?= python3
VENV ?= .venv
MODEL ?= tiny-sdar
RUN = $(VENV)/bin/python

demo: venv
	$(RUN) algos/bgpo.py --model $(MODEL)

speedrun: venv
	PYTHON=$(abspath $(RUN)) bash speedrun.sh

# Two workers; the tests of a file stay in one of them, because they share what its fixtures make.
test: venv
	$(RUN) -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder tests
	@$(RUN) tests/size.py

test-all: venv
	$(RUN) -m pytest -q tests --all

test-gpu: venv
	$(RUN) -m pytest -q -m cuda tests

$(VENV)/installed: requirements.txt
	$(PYTHON) -m venv $(VENV)
	@echo "Installing requirements.txt into $(VENV), about two minutes:"
	$(RUN) -m pip install --disable-pip-version-check -r requirements.txt
	touch $@

venv: $(VENV)/installed
	@echo "Python is $(abspath $(RUN)); to use it: source $(abspath $(VENV))/bin/activate"

.PHONY: demo speedrun test test-all test-gpu venv
