#!/bin/bash
# Compiles everything, unless nothing at all has changed.
cat >/workspace/Makefile <<'M'
bin/shapes: $(wildcard src/*.c include/*.h) Makefile
	@mkdir -p bin build
	@for f in src/*.c; do $(CC) -Iinclude -O1 -Wall $(CFLAGS) -c -o build/$$(basename $$f .c).o $$f || exit; done
	$(CC) -o $@ build/*.o
clean:
	rm -rf bin build
.PHONY: clean
M
