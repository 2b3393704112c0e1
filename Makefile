# The whole tool surface: make install | check | test | demo
.PHONY: install check test demo

install:
	./scripts/setup

check:
	./scripts/check

test:
	./scripts/test

demo:
	./scripts/quickstart
