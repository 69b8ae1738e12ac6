# engined, from a clean clone. Every target installs what it needs. If that fails, `.ci/prepare` prints
# the reason in one line.

.PHONY: build demo test nightly durations lint format sanitize fuzz instructions micro micro-kernel test-vm soak bench bench-peers
.PHONY: chart compare docs wheel wheels deb clean test-pythons test-arm64

# .venv/bin/engined, with compiled extensions. They are compiled again only after a change of
# pyproject.toml, setup.py or engine/_fast.
build:
	@.ci/prepare build

# Starts an engine, loads an image of Debian's busybox, runs a container, and shows its output and the
# time of each step. Leaves nothing behind.
demo: build
	@.venv/bin/python -m tests.demo

# Workers wait for more than half of their time. Each has a network namespace of its own. Where
# PYTHONDONTWRITEBYTECODE is set, each worker would compile all tests, so it is not. ARGS are
# pytest's:
#   make test ARGS="-k attach"
PYTEST = env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -m pytest
SPREAD = -n $$((2 * $$(nproc) + 1)) --maxprocesses 8 --dist loadfile --no-loadscope-reorder
test:
	@.ci/prepare test
	@.ci/cgroups
	@exec $(PYTEST) $(SPREAD) --skips declared $(ARGS)

# What `make test` leaves out: soaks, kills by the hundred, the whole matrix of clients, long fuzz.
# MINUTES is for each soak and the fuzzer.
MINUTES = 5
nightly:
	@.ci/prepare test
	@.ci/prepare peers
	@.ci/prepare roots
	@.ci/cgroups
	@export ENGINED_TEST_PATIENCE=3 ENGINED_SOAK_MINUTES=$(MINUTES); exec $(PYTEST) $(SPREAD) --skips declared --nightly -o faulthandler_timeout=3600 $(ARGS)

# All tests, and then tests/durations.json says how long each file took.
durations:
	@$(MAKE) --no-print-directory test ARGS=--note-durations

# The unit tests with Python 3.12, 3.13 and 3.14, or with those of ARGS: make test-pythons ARGS=3.14
test-pythons:
	@.ci/prepare pythons
	@.ci/pythons $(ARGS)

# The tests in a virtual machine with Debian's kernel, cgroup v2 and AppArmor. ARGS are parts:
# make test-vm ARGS="unit"
test-vm:
	@.ci/prepare vm
	@.venv/bin/python -m tests.vm $(ARGS)

# The package for arm64, which `make deb ARGS="--suite bookworm --architecture arm64"` makes, in an
# emulated machine with Debian's arm64 kernel:
test-arm64:
	@.ci/prepare vm
	@.venv/bin/python -m tests.vm.arm64 $(ARGS)

# Containers write lines while daemon and monitor are killed at random:
# make soak ARGS="--minutes 15"
soak:
	@.ci/prepare test
	@.ci/cgroups
	@.venv/bin/python -m tests.soak.engine $(ARGS)

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

# The micro-benchmarks of engine/_fast and the hot path around it: times.
micro:
	@.ci/prepare unit
	@.venv/bin/python -m pytest -q bench/micro $(ARGS)

# Their instructions, which fail where they have grown against those accepted:
# make instructions ARGS=--accept
instructions:
	@.ci/prepare unit
	@.venv/bin/python -m bench.micro.instructions $(ARGS)

# What calls of the kernel cost beside a thousand objects of one kind, without containers:
# make micro-kernel ARGS="--objects 3000 sysfs"
micro-kernel:
	@.ci/prepare unit
	@.ci/cgroups
	@.venv/bin/python -m bench.micro.kernel $(ARGS)

# Installs Debian's dockerd and podman for comparisons. They are not started as services.
bench-peers:
	@.ci/prepare peers

# The unit tests of engine/_fast and a fuzzer, with AddressSanitizer and UndefinedBehaviorSanitizer:
# make sanitize SECONDS=600 SEED=1
SECONDS = 60
sanitize:
	@.ci/prepare unit
	@.ci/sanitize $(SECONDS) $(SEED)

# The fuzzer alone, without sanitizers: make fuzz ARGS="--seconds 600 --target layer_unpack"
fuzz:
	@.ci/prepare unit
	@.venv/bin/python -m tests.fuzz $(ARGS)

# ruff and tests/lint beside mypy. All of them run, whatever the others find.
lint:
	@.ci/prepare lint
	@.venv/bin/mypy & mypy=$$!; found=0; .venv/bin/ruff check . || found=1; .venv/bin/ruff format --check . || found=1; \
		.venv/bin/python -m tests.lint || found=1; wait $$mypy && exit $$found

format:
	@.ci/prepare lint
	@.venv/bin/ruff check --fix .
	@.venv/bin/ruff format .

# dist/*.whl for this machine's Python, of what `make build` has compiled.
wheel: build
	@.venv/bin/python .ci/wheels.py --here

# dist/*.whl for CPython 3.11 to 3.14 on x86_64 and aarch64, and an sdist, all from this machine:
# make wheels ARGS="--python 3.13 --machine x86_64"
wheels:
	@.ci/prepare wheels
	@.venv/bin/python .ci/wheels.py $(ARGS)

# dist/*.deb for Debian 12, Debian 13 and Ubuntu 24.04:
# make deb ARGS="--suite trixie --architecture arm64"
deb:
	@.ci/prepare wheels
	@.venv/bin/python .ci/deb.py $(ARGS)

clean:
	rm -rf .venv .sanitize build dist *.egg-info engine/_fast/*.c engine/_fast/*.so
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
