#!/bin/bash
set -e
cd /workspace
python3 - <<'P'
from pathlib import Path
file = Path("columns.c")
text = file.read_text()
start, end = text.index("int main(void)"), text.index("    for (size_t i = 0; i < used_columns; i++) {\n        qsort")
text = text[:start] + """int main(void)
{
    char *line = NULL;
    size_t size = 0;
    while (getline(&line, &size, stdin) != -1) {
        size_t index = 0;
        for (char *word = strtok(line, " \\t\\n"); word; word = strtok(NULL, " \\t\\n"))
            add(column_at(index++), word);
    }
    free(line);
""" + text[end:]
for old, new in (
    ("i <= column->used", "i < column->used"),
    ("column->entries && strcmp", "strcmp"),
    ("realloc(column->entries, column->size)", "realloc(column->entries, column->size * sizeof *column->entries)"),
    (".word = word;", ".word = strdup(word);"),
    ("size_columns * sizeof *columns);\n", "size_columns * sizeof *columns);\n"
     "        memset(columns + used_columns, 0, (size_columns - used_columns) * sizeof *columns);\n"),
    ("columns[i].entries[j].word);\n    }\n", "columns[i].entries[j].word);\n"
     "        for (size_t j = 0; j < columns[i].used; j++)\n            free(columns[i].entries[j].word);\n"
     "        free(columns[i].entries);\n    }\n    free(columns);\n"),
):
    assert old in text, old
    text = text.replace(old, new)
file.write_text(text)
P
make
