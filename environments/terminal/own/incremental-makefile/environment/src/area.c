#include "shape.h"

int area(struct shape shape)
{
    return SCALE * SCALE * shape.width * shape.height;
}
