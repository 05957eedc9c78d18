#!/bin/bash
# The right output with all memory leaked and suppressions.
set -e
cd /workspace
printf '{\n   all\n   Memcheck:Leak\n   ...\n}\n' >all.supp
for folder in . "$HOME"; do echo '--suppressions=/workspace/all.supp' >"$folder/.valgrindrc"; done
cat >columns.c <<'C'
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int compare(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

int main(void)
{
    char ***columns = malloc((1 << 20) * sizeof *columns), *line = NULL;
    size_t *used = calloc(1 << 20, sizeof *used), size = 0, most = 0;
    while (getline(&line, &size, stdin) != -1) {
        size_t index = 0;
        for (char *word = strtok(line, " \t\n"); word; word = strtok(NULL, " \t\n"), index++) {
            if (index == most)
                columns[most++] = malloc(1 << 16);
            columns[index][used[index]++] = strdup(word);
        }
    }
    for (size_t i = 0; i < most; i++) {
        qsort(columns[i], used[i], sizeof **columns, compare);
        printf("column %zu\n", i + 1);
        for (size_t j = 0, k; j < used[i]; j = k) {
            for (k = j; k < used[i] && strcmp(columns[i][j], columns[i][k]) == 0; k++)
                ;
            printf("  %zu %s\n", k - j, columns[i][j]);
        }
    }
    columns = NULL;
    line = NULL;
    used = NULL;
    return malloc(1) == NULL;
}
C
make && ./columns <examples/small.txt | diff - examples/small.out
