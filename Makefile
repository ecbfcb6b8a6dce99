# doz: Linux sandboxes on your own computer. `make` lists the targets.
SHELL := /bin/bash
.DEFAULT_GOAL := help

ARCH    := $(if $(filter aarch64 arm64,$(shell uname -m)),arm64,x86_64)
VERSION := $(shell git describe --always --dirty 2>/dev/null || echo dev)
PUBLIC  := 0
LAB     := .cache/lab-$(ARCH)-$(shell sha256sum guest/images/lab/build.sh | cut -c1-12).tar
STORE   := $(CURDIR)/.cache/try
STATICCHECK := v0.8.2

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

deps: ## install what is missing of QEMU and the tools (says what first)
	@guest/deps.sh

build: ## build bin/doz and all it runs from; needs only Go
	@mkdir -p bin libexec/doz
	CGO_ENABLED=0 go build -trimpath -ldflags '-s -w -X main.version=$(VERSION)' -o libexec/doz/doz.new ./cmd/doz
	@mv libexec/doz/doz.new libexec/doz/doz
	@ln -sfn ../libexec/doz/doz bin/doz
	go run ./guest/pack -arch $(ARCH) -out libexec/doz -version '$(VERSION)' $(if $(filter 1,$(PUBLIC)),-public)

$(LAB): | deps
	@mkdir -p .cache; rm -f .cache/lab-$(ARCH)-*.tar*
	guest/images/lab/build.sh $@

lab: deps build $(LAB) ## make the lab image in the store (STORE=… for another than .cache/try)
	bin/doz image import lab $(LAB) --store $(STORE)

try: lab ## install, build, make the lab image, boot a sandbox, run a command in it
	@set -e; export DOZ_STORE=$(STORE); trap 'bin/doz rm -q --yes try1 >/dev/null 2>&1 || true; bin/doz host stop >/dev/null' EXIT; \
	show() { echo "\$$ doz $$*"; bin/doz "$$@"; }; \
	bin/doz rm -q --yes try1 >/dev/null 2>&1 || true; \
	show create try1; show start try1; show exec try1 -- uname -a; show exec try1 -- python3 -c 'print("hello from inside")'; show ls; show rm --yes try1

test: deps build $(LAB) ## run every test, those on real machines included
	@test -z "$$(gofmt -l .)" || { echo "not formatted:"; gofmt -l .; exit 1; }
	go vet ./...
	DOZ_LAB_TAR=$(CURDIR)/$(LAB) DOZ_PARTS=$(CURDIR)/libexec/doz go test -timeout 14m ./...
	go test -race -timeout 10m ./cmd/deckhold/ ./internal/parts/ ./internal/guest/ ./internal/sandbox/ ./internal/host/ ./internal/image/ ./internal/wire/ ./internal/client/

lint: ## run the linters
	@test -z "$$(gofmt -l .)" || { gofmt -l .; exit 1; }
	go vet ./...
	go run honnef.co/go/tools/cmd/staticcheck@$(STATICCHECK) ./...
	@! command -v shellcheck >/dev/null || shellcheck -S warning .ci/run $$(git ls-files '*.sh')

kernel: ## build the guest kernels again and compare (11 minutes of two processors)
	guest/kernel/make.sh

tools: ## build the tools layers again from Debian's packages
	guest/tools/make.sh

bench: deps build $(LAB) ## measure, and print each figure beside its yardstick
	DOZ_LAB_TAR=$(CURDIR)/$(LAB) DOZ_PARTS=$(CURDIR)/libexec/doz go run ./bench

clean: ## remove what was built; images and sandboxes in other stores stay
	@! test -S $(STORE)/host.sock || bin/doz host stop --store $(STORE)
	rm -rf bin libexec .cache

.PHONY: help deps build lab try test lint kernel tools bench clean
