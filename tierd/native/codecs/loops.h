// All loops for one instruction set, which TIERD_LANES names.
#include "vectors.h"
#include "int8.h"
#include "rotated.h"
#include "tiles.h"
#include "rans.h"
#include "lossless.h"
#include "kivi.h"
#include "kvquant.h"
