# engined, from a clean clone. Every target prepares what it needs; `.ci/prepare` says in one line what it cannot.

.PHONY: build demo test bench bench-peers chart compare micro micro-once lint format wheel clean

# .venv/bin/engined, with compiled extensions; again only after a change of pyproject.toml, setup.py or engine/_fast.
build:
	@.ci/prepare build

# An engine, an image of Debian's busybox, one container: its output and how long each step took. Leaves nothing behind.
demo: build
	@.venv/bin/python -m tests.demo

# ARGS are pytest's: make test ARGS="-k attach"
test:
	@.ci/prepare test
	@.ci/cgroups
	@.venv/bin/python -m pytest $(ARGS)

# ARGS are the benchmark's: make bench ARGS="--row run --row exec"
bench: build
	@.ci/cgroups
	@.venv/bin/python -m bench.run $(ARGS)

# The figures of docs/ (table, chart, document) from one run: make chart JSON=bench/results/X.json
chart: build
	@.venv/bin/python -m bench.publish $(JSON)

# Two runs side by side: make compare A=bench/results/X.json B=bench/results/Y.json
compare: build
	@.venv/bin/python -m bench.compare $(A) $(B)

# The micro-benchmarks of engine/_fast.
micro:
	@.ci/prepare test
	@.venv/bin/python -m pytest -q bench/micro $(ARGS)

# Each of them once, as CI does: whether they still hold, not how fast.
micro-once: ARGS = --benchmark-min-rounds=1 --benchmark-max-time=0 --benchmark-min-time=0.000001 --benchmark-columns=min,rounds
micro-once: micro

# dockerd and podman from Debian to compare with; installed, never started as services.
bench-peers:
	@.ci/prepare peers

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
	@.venv/bin/pip wheel -q --no-deps --no-build-isolation -w dist .
	@ls dist/*.whl

clean:
	rm -rf .venv build dist *.egg-info engine/_fast/*.c engine/_fast/*.so
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
