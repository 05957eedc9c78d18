#ifndef UNITS_H
#define UNITS_H
#define SCALE 1
#endif
