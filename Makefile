# mgpu-agent: `make help` is the map.

PYTHON   ?= /usr/bin/python3
BUILD    := build
VENV     := $(BUILD)/venv
BIN      := $(VENV)/bin
DESTDIR  ?=
PREFIX   ?= /usr
LIB      := $(PREFIX)/lib/mgpu
export PATH := $(CURDIR)/$(BIN):$(PATH)

.DEFAULT_GOAL := help
.PHONY: help deps sim demo test test-unit test-kernel bench lint format install clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

deps: $(BUILD)/deps.stamp ## apt packages and the virtual environment (root, once)

$(BUILD)/deps.stamp: packaging/apt-packages.txt packaging/install-deps setup.cfg
	packaging/install-deps $(PYTHON) $(VENV)
	@touch $@

sim: deps ## the simulated GPU: build/sim/libcuda.so.1, libnvidia-ml.so.1, mgpu-sim
	$(MAKE) --no-print-directory -C sim

demo: sim ## the main job on two simulated cards (root)
	$(BIN)/python tests/demo.py

test: sim lint ## everything that runs on this kernel (root)
	$(BIN)/python -m pytest tests/unit tests/kernel

test-unit: sim ## tests that need no root
	$(BIN)/python -m pytest tests/unit

test-kernel: sim ## tests against this machine's kernel (root)
	$(BIN)/python -m pytest tests/kernel

bench: sim ## measure; writes build/bench.json and docs/benchmarks.md (root)
	$(BIN)/python -m tests.bench

lint: deps ## ruff, mypy --strict, and a check that the code runs on Python 3.8
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/vermin --quiet --no-tips --violations -t=3.8- agent

format: deps ## let ruff format the tree
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: deps ## the agent with its Python packages, BPF sources, unit and configuration, below DESTDIR
	install -d $(DESTDIR)$(LIB) $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/share/mgpu/bpf \
	    $(DESTDIR)$(PREFIX)/lib/systemd/system $(DESTDIR)/etc/mgpu
	$(BIN)/python -m pip install --quiet --upgrade --target $(DESTDIR)$(LIB) .
	for name in agent:daemon cli:cli; do \
	    sed -e 's#@LIB@#$(LIB)#' -e "s#@MODULE@#$${name#*:}#" packaging/launcher \
	        > $(DESTDIR)$(PREFIX)/bin/mgpu-$${name%:*}; \
	    chmod 0755 $(DESTDIR)$(PREFIX)/bin/mgpu-$${name%:*}; \
	done
	install -m 0644 bpf/*.c bpf/*.h $(DESTDIR)$(PREFIX)/share/mgpu/bpf/
	install -m 0644 systemd/mgpu-agent.service $(DESTDIR)$(PREFIX)/lib/systemd/system/
	[ -e $(DESTDIR)/etc/mgpu/agent.conf ] || \
	    install -m 0644 packaging/agent.conf $(DESTDIR)/etc/mgpu/agent.conf
	[ -n "$(DESTDIR)" ] || getent group mgpu >/dev/null || groupadd --system mgpu

clean: ## remove what was built
	rm -rf $(BUILD)
