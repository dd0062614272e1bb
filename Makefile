# `make` lists the targets. `make demo` and `make test` install what they need.

VERSION     := $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2
FUZZTIME    ?= 10s
# Two packages at once: many tests start real machines.
TESTFLAGS   ?= -p 2 -timeout 15m
PKG         ?= ./...

.DEFAULT_GOAL := help
.PHONY: help setup build blobs demo clean-demo test test-long lint race fuzz bench clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-18s %s\n", $$1, $$2}'

setup: ## install what sandboxes need on this machine (Debian, Ubuntu)
	@scripts/setup.sh run

build: blobs ## build bin/space, static, with the guest daemon and runsc inside
	@mkdir -p bin
	CGO_ENABLED=0 go build -trimpath -buildvcs=false -ldflags "-s -w -X main.version=$(VERSION)" -o bin/space ./cmd/space

blobs:
	@scripts/build-blobs.sh

demo: setup build ## see it work: an isolated machine runs Python
	@scripts/demo.sh

clean-demo: ## remove the templates that the demo keeps
	@scripts/demo.sh --clean

test: ## install what tests need, build, run the tests
	@scripts/setup.sh test
	@$(MAKE) --no-print-directory build
	go test $(TESTFLAGS) $(PKG)

test-long: ## the tests with literal intervals, many rounds, real base images twice
	@scripts/setup.sh test
	@$(MAKE) --no-print-directory build
	SPACE_LONG=1 go test -tags long -p 1 -timeout 75m $(PKG)

lint: ## go vet, gofmt, staticcheck
	go vet ./...
	@bad=$$(gofmt -l $$(git ls-files -co --exclude-standard '*.go')); [ -z "$$bad" ] || { echo "gofmt -w needed:"; echo "$$bad"; exit 1; }
	go run $(STATICCHECK) ./...

race: ## the tests under the race detector
	@scripts/setup.sh dev
	@$(MAKE) --no-print-directory blobs
	CGO_ENABLED=1 go test -race -p 2 -timeout 30m $(PKG)

fuzz: ## every fuzz test for FUZZTIME (10s)
	@scripts/fuzz.sh $(FUZZTIME)

bench: setup build ## measure, print the table, write bench/results/latest.json
	go run ./bench

clean: ## remove what was built (not data, not caches)
	rm -rf bin build internal/blob/files/*.gz internal/blob/files/*.sha256 internal/blob/files/*.new
