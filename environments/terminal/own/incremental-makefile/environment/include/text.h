#ifndef TEXT_H
#define TEXT_H
void print_value(const char *name, int value);
#endif
