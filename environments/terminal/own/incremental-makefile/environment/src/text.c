#include "text.h"

#include <stdio.h>

void print_value(const char *name, int value)
{
    printf("%s=%d\n", name, value);
}
