#include "shape.h"
#include "text.h"

#include <stdlib.h>

int main(int argc, char **argv)
{
    struct shape shape = {argc > 1 ? atoi(argv[1]) : 3, argc > 2 ? atoi(argv[2]) : 4};
    print_value("area", area(shape));
    print_value("border", border(shape));
    return 0;
}
