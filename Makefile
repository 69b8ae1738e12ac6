# engined, from a clean clone. Every target installs what it needs. If that fails, `.ci/prepare` prints
# the reason in one line.

.PHONY: build demo test sanitize fuzz test-vm soak bench bench-peers chart compare docs micro micro-once lint format wheel clean

# .venv/bin/engined, with compiled extensions. They are compiled again only after a change of
# pyproject.toml, setup.py or engine/_fast.
build:
	@.ci/prepare build

# Starts an engine, loads an image of Debian's busybox, runs a container, and shows its output and the
# time of each step. Leaves nothing behind.
demo: build
	@.venv/bin/python -m tests.demo

# One process more than cores, as tests wait for half of their time, but four at most. Each has a
# network namespace of its own. ARGS are pytest's:
#   make test ARGS="-k attach"
test:
	@.ci/prepare test
	@.ci/cgroups
	@.venv/bin/python -m pytest -n $$(($$(nproc) + 1)) --maxprocesses 4 --dist loadfile --skips declared $(ARGS)

# The tests in a virtual machine with Debian's kernel, cgroup v2 and AppArmor. ARGS are parts:
# make test-vm ARGS="unit"
test-vm:
	@.ci/prepare vm
	@.venv/bin/python -m tests.vm $(ARGS)

# Containers write lines while daemon and monitor are killed at random:
# make soak ARGS="--minutes 15"
soak:
	@.ci/prepare test
	@.ci/cgroups
	@.venv/bin/python -m tests.soak $(ARGS)

# ARGS are the benchmark's: make bench ARGS="--row run --row exec"
bench: build
	@.ci/cgroups
	@.venv/bin/python -m bench.run $(ARGS)

# The figures of docs/ (table, chart, document) from one run:
# make chart JSON=bench/results/X.json
chart: build
	@.venv/bin/python -m bench.publish $(JSON)

# Two runs side by side: make compare A=bench/results/X.json B=bench/results/Y.json
compare: build
	@.venv/bin/python -m bench.compare $(A) $(B)

# Writes the parts of docs/ and README that are generated from the code.
docs: build
	@.venv/bin/python docs/generate.py

# The micro-benchmarks of engine/_fast.
micro:
	@.ci/prepare test
	@.venv/bin/python -m pytest -q bench/micro $(ARGS)

# Runs each micro-benchmark once, as CI does, to check that it works. The times mean nothing.
micro-once: ARGS = --benchmark-min-rounds=1 --benchmark-max-time=0 --benchmark-min-time=0.000001 --benchmark-columns=min,rounds
micro-once: micro

# Installs Debian's dockerd and podman for comparisons. They are not started as services.
bench-peers:
	@.ci/prepare peers

# The unit tests of engine/_fast and a fuzzer, with AddressSanitizer and UndefinedBehaviorSanitizer:
# make sanitize SECONDS=600 SEED=1
SECONDS = 60
sanitize:
	@.ci/prepare test
	@.ci/sanitize $(SECONDS) $(SEED)

# The fuzzer alone, without sanitizers: make fuzz ARGS="--seconds 600 --target layer_unpack"
fuzz:
	@.ci/prepare test
	@.venv/bin/python -m tests.fuzz $(ARGS)

lint:
	@.ci/prepare lint
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy

format:
	@.ci/prepare lint
	@.venv/bin/ruff check --fix .
	@.venv/bin/ruff format .

wheel: build
	@rm -rf build  # modules of earlier versions
	@.venv/bin/pip wheel -q --no-deps --no-build-isolation -w dist .
	@ls dist/*.whl

clean:
	rm -rf .venv .sanitize build dist *.egg-info engine/_fast/*.c engine/_fast/*.so
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
