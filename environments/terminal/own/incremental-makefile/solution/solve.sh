#!/bin/bash
cat >/workspace/Makefile <<'M'
sources := $(wildcard src/*.c)
objects := $(sources:src/%.c=build/%.o)

bin/shapes: $(objects) build/objects.txt Makefile
	@mkdir -p $(@D)
	$(CC) -o $@ $(objects)

build/%.o: src/%.c Makefile
	@mkdir -p $(@D)
	$(CC) -Iinclude -O1 -Wall $(CFLAGS) -MMD -MP -c -o $@ $<

# The list of objects changes only when a source file was added or deleted.
build/objects.txt: force
	@mkdir -p $(@D)
	@echo '$(objects)' | cmp -s - $@ || echo '$(objects)' >$@

clean:
	rm -rf bin build

.PHONY: clean force
-include $(objects:.o=.d)
M
