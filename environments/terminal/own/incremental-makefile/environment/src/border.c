#include "shape.h"

int border(struct shape shape)
{
    return SCALE * 2 * (shape.width + shape.height);
}
