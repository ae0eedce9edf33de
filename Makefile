# make demo   venv + install + convert a real GPTQ checkpoint, inspect, verify, multiply
# make test   every test that needs no GPU
# make fuzz   every reader, SECONDS each (docs/security.md)
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
DEMO   := examples/llama-tiny-gptq-w4g64

SECONDS ?= 10
SEED ?= 0

.PHONY: demo test fuzz clean

$(BIN)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $@

demo: $(BIN)/.installed
	rm -rf build/demo && mkdir -p build/demo
	$(BIN)/convert gptq-to-marlin $(DEMO) build/demo/marlin
	$(BIN)/convert inspect build/demo/marlin
	$(BIN)/convert verify build/demo/marlin --against $(DEMO)
	$(BIN)/python examples/multiply.py build/demo/marlin $(DEMO)/expected.npz

test: $(BIN)/.installed
	$(BIN)/python -m pytest -q -n 2

fuzz: $(BIN)/.installed
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check atheris
	$(BIN)/python tests/fuzz/run.py --seconds $(SECONDS) --seed $(SEED)

clean:
	rm -rf $(VENV) build *.egg-info
