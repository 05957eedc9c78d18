#ifndef SHAPE_H
#define SHAPE_H
#include "units.h"
struct shape {
    int width, height;
};
int area(struct shape shape);
int border(struct shape shape);
#endif
