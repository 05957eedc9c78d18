/* columns: reads lines of words, and prints the words of each column with their counts, sorted.

   Input: lines of words separated by blanks or tabs. Output: for each column, in order, a line "column N", then one
   line "  COUNT WORD" per distinct word of this column, in bytewise order of the words. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct entry {
    char *word;
    int count;
};

struct column {
    struct entry *entries;
    size_t used, size;
};

static struct column *columns;
static size_t used_columns, size_columns;

static void add(struct column *column, char *word)
{
    for (size_t i = 0; i <= column->used; i++)
        if (column->entries && strcmp(column->entries[i].word, word) == 0) {
            column->entries[i].count++;
            return;
        }
    if (column->used == column->size) {
        column->size = column->size ? 2 * column->size : 4;
        column->entries = realloc(column->entries, column->size);
    }
    column->entries[column->used].word = word;
    column->entries[column->used].count = 1;
    column->used++;
}

static struct column *column_at(size_t index)
{
    if (index >= size_columns) {
        size_columns = size_columns ? 2 * size_columns : 2;
        columns = realloc(columns, size_columns * sizeof *columns);
    }
    if (index >= used_columns)
        used_columns = index + 1;
    return &columns[index];
}

static int compare(const void *a, const void *b)
{
    return strcmp(((const struct entry *)a)->word, ((const struct entry *)b)->word);
}

int main(void)
{
    char line[128];
    while (fgets(line, sizeof line, stdin)) {
        size_t index = 0;
        for (char *word = strtok(line, " \t\n"); word; word = strtok(NULL, " \t\n")) {
            char *copy = malloc(strlen(word));
            strcpy(copy, word);
            add(column_at(index++), copy);
        }
    }
    for (size_t i = 0; i < used_columns; i++) {
        qsort(columns[i].entries, columns[i].used, sizeof(struct entry), compare);
        printf("column %zu\n", i + 1);
        for (size_t j = 0; j < columns[i].used; j++)
            printf("  %d %s\n", columns[i].entries[j].count, columns[i].entries[j].word);
    }
    return 0;
}
